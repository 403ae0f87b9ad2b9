"""``bench``: compare scaling policies, modes, adapter routing and session routing on simulated replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import click
import msgspec
from rich.table import Table

from policy.errors import ConfigError, TargetError
from policy.scaling.policies import registry
from sim.benchmarks.adapters.benchmark import NAMES as ROUTINGS
from sim.benchmarks.adapters.benchmark import (
    AdapterTraffic,
    PlacementComparison,
    PlacementRunResult,
    ReplicasAndSlots,
    compare_seeds,
)
from sim.benchmarks.mode_switching import BY_LOAD, ModeBenchmark, compare, curves
from sim.benchmarks.policies.benchmark_setup import TraceHalf, setup_of
from sim.benchmarks.policies.chart import chart
from sim.benchmarks.policies.gpu_time_ranking import Ranking, RankingTable, rank
from sim.benchmarks.policies.run import run_all, trials
from sim.benchmarks.policies.sizing import ReplicaSize, size_of
from sim.charts.comparison_table import percent, seconds
from sim.charts.figure_style import ChartPanel, bars
from sim.results.chart_series import clock
from sim.simulator.run import simulate
from sim.workload.workload_spec import arrivals_of
from tidegate import deployment_file
from tidegate.commands.options import (
    CommaSeparated,
    FiniteFloat,
    OutputFile,
    as_json,
    file_argument,
    number_between,
    number_option,
    plot_option,
    seed_option,
    trace_option,
)
from tidegate.commands.simulation.bench_agents import agents
from tidegate.commands.simulation.policy_options import policy_entries, simulated_policy
from tidegate.commands.terminal import ProgressBar, console, print_json, table, warn
from tidegate.commands.units import optional, plural

_SUFFIXES = (".csv", ".jsonl", ".gz")
# With --quick: one seed, and every third setting.
_QUICK = 3
# The router's bound on a replica's load, in units of the mean load.
BOUND = 1.25


@click.group(help="Compare policies on simulated replicas.")
def bench() -> None:
    """The group; no deployment has to run."""


bench.add_command(agents)


class PolicyRanking(msgspec.Struct, frozen=True, kw_only=True):
    """The ranking of policies on one trace."""

    trace: str
    half: str
    seeds: int
    profile: str
    size: ReplicaSize
    table: RankingTable


def _policy_name(text: str) -> str:
    if text not in registry.NAMES:
        raise ValueError
    return text


@bench.command(
    help="Simulate every scaling policy at many settings on traces, and compare its GPU-hours at the same "
    "SLO attainment with the offline optimum, the cheapest run known."
)
@click.option(
    "--traces", "where", type=click.Path(path_type=Path), required=True, envvar="TIDEGATE_TRACES",
    show_envvar=True, help="A trace, or a folder of traces.",
)  # fmt: skip
@click.option(
    "--start-times",
    type=CommaSeparated("SECONDS,...", number_between(0, 3600), "seconds above 0 and up to 3600"),
    default="30,120", show_default=True, help="Start-up times of replicas, in seconds.",
)  # fmt: skip
@click.option("--seeds", type=click.IntRange(1, 100), default=5, show_default=True, help="Number of seeds.")
@click.option(
    "--half", type=click.Choice([str(each) for each in TraceHalf]), default=str(TraceHalf.TEST),
    show_default=True, help="First or second half of each trace; defaults were tuned on the first.",
)  # fmt: skip
@click.option(
    "--policies", "names", type=CommaSeparated("NAME,...", _policy_name,
        f"some of {', '.join(registry.NAMES)}"),
    default=",".join(registry.NAMES), help="Policies to compare; default: all.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="One seed, and a third of the settings.")
@click.option("--processes", type=click.IntRange(1, 256), help="Parallel processes; default: one per core.")
@click.option(
    "--plot", type=OutputFile(),
    help="Write a chart to this file, as SVG; with several traces, one file per trace with its name added.",
)  # fmt: skip
@as_json
def policies(
    *,
    where: Path,
    start_times: tuple[float, ...],
    seeds: int,
    half: str,
    names: tuple[str, ...],
    quick: bool,
    processes: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    traces = _traces(where)
    count = 1 if quick else seeds
    scores: list[PolicyRanking] = []
    for trace in traces:
        setup = setup_of(trace, TraceHalf(half))
        warn(f"{trace.name}: measuring the capacity of a replica")
        try:
            size = size_of(setup, start_times[0])
            settings = trials(
                setup, size, names, leads_s=start_times, seeds=range(count), each=_QUICK if quick else 1
            )
            with ProgressBar("trials") as bar:
                advance = partial(bar.advance, len(settings), trace.name)
                ranking = rank(run_all(settings, processes, advance))
        except ValueError as error:
            if trace is traces[-1] and not scores:
                raise TargetError(f"{trace.name}: {error}") from None
            warn(f"{trace.name}: {error}")
            continue
        score = PolicyRanking(
            trace=trace.name, half=half, seeds=count, profile=setup.profile, size=size, table=ranking
        )
        scores.append(score)
        if plot is not None:
            path = plot if len(traces) == 1 else plot.with_stem(f"{plot.stem}-{trace.stem}")
            path.write_text(chart(_ranking_title(score), ranking, setup.attainment), encoding="utf-8")
            warn(f"Chart written to {path}")
        if not as_json:
            print_ranking(score, setup.attainment)
    if as_json:
        print_json({"traces": scores})


def _traces(where: Path) -> list[Path]:
    if where.is_file():
        return [where]
    traces = sorted(path for path in where.glob("*") if path.suffix in _SUFFIXES) if where.is_dir() else []
    if not traces:
        raise ConfigError(
            "--traces", str(where), f"a trace, or a folder with files in {', '.join(_SUFFIXES)}"
        )
    return traces


def _ranking_title(score: PolicyRanking) -> str:
    half = "first half" if score.half == TraceHalf.TUNING else "second half"
    load = f"load x {score.size.factor:g} on {score.profile}"
    return f"{score.trace}, {half}, {load}, {plural(score.seeds, 'seed')}"


def print_ranking(score: PolicyRanking, promised: float) -> None:
    number = "{:.2f}".format
    for oracle in score.table.oracles:
        lower = optional(oracle.lower_gpu_hours, ", lower bound {:.2f}".format) or ""
        missed = f"\nno run attains {promised:.2%}: all compared at {oracle.target:.2%}"
        note = missed if oracle.target < promised else ""
        plan = optional(oracle.plan_gpu_hours, number) or "-"
        rankings = [ranking for ranking in score.table.standings if ranking.lead_s == oracle.lead_s]
        costs = table(
            rankings,
            ("policy", lambda ranking: ranking.policy),
            (
                f">GPU-hours\nat {100 * oracle.target:g} %",
                lambda ranking: optional(ranking.gpu_hours, number),
            ),
            (">x optimum", lambda ranking: optional(ranking.oracle_ratio, number)),
            (
                ">by seed",
                lambda ranking: optional(
                    ranking.least_ratio, lambda least: f"{least:.2f}-{ranking.most_ratio:.2f}"
                ),
            ),
            (">x lower\nbound", lambda ranking: optional(ranking.lower_ratio, number)),
            (">forecast\nerror, GPU-h", lambda ranking: _regret_h(ranking, "forecast_s")),
            (">start-up\ntime, GPU-h", lambda ranking: _regret_h(ranking, "lead_s")),
            (">rounding\nup, GPU-h", lambda ranking: _regret_h(ranking, "integrality_s")),
        )
        runs = table(
            rankings,
            ("policy", lambda ranking: ranking.policy),
            (">attainment", lambda ranking: f"{ranking.attainment:.2%}"),
            (">GPU-hours", lambda ranking: number(ranking.setting_gpu_hours)),
            (">goodput per\nGPU-hour", lambda ranking: f"{ranking.goodput_per_gpu_hour:.0f}"),
            (">TTFT p99", lambda ranking: optional(ranking.ttft_p99_s, "{:.2f} s".format)),
            (">recovery", lambda ranking: optional(ranking.recovery_s, "{:.0f} s".format)),
        )
        title = (
            f"{_ranking_title(score)}\nstart-up time {oracle.lead_s:g} s\n"
            f"offline optimum: {oracle.gpu_hours:.2f} GPU-hours, {oracle.replicas:.1f} replicas "
            f"(cheapest plan {plan}{lower}){note}"
        )
        which = f"\nThe cheapest setting of each that attains {oracle.target:.2%}, or that attains most:"
        console().print(title, costs, which, runs, "", sep="\n")


def _regret_h(ranking: Ranking, part: str) -> str | None:
    return optional(getattr(ranking.regret, part, None), lambda part_s: f"{part_s / 3600:.2f}")


@bench.command(
    help="Simulate a trace on the deployment in FILE with automatic mode switches, and with each of its "
    "modes alone at its maximum replica count."
)
@file_argument
@trace_option(required=True)
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True, help="Number of seeds.")
@seed_option(note=" of the first run")
@plot_option("a chart")
@as_json
def modes(*, file: Path, trace: Path, seeds: int, seed: int, plot: Path | None, as_json: bool) -> None:
    deployment = simulated_policy(deployment_file.load(file, ray=False).deployment)
    (automatic,) = policy_entries(deployment, [], warn)
    ends_at = max((arrival.at for arrival in arrivals_of(trace, seed)), default=None)
    if ends_at is None:
        raise ConfigError(str(trace), "no request", "at least one request")
    simulated_s = ends_at * seeds
    with ProgressBar("simulated", clock) as bar:
        benchmark = compare(
            automatic,
            lambda each: arrivals_of(trace, each),
            lambda entry, arrivals, each, progress: simulate(
                entry.deployment, entry.policies, arrivals, seed=each, progress=progress
            ),
            range(seed, seed + seeds),
            lambda name, at: bar.update(at, simulated_s, task=name),
        )
    if plot is not None:
        title = f"{trace.name} on {file.name}: requests/s within the SLO, seed {seed}"
        first = {name: row[0] for name, row in benchmark.trials.items()}
        plot.write_text(curves(title, first), encoding="utf-8")
    if as_json:
        print_json({"trace": trace.name, **benchmark.plain()})
        return
    console().print(_modes_table(benchmark))
    click.echo(_gain(benchmark))
    if plot is not None:
        click.echo(f"Chart written to {plot}")


def _modes_table(benchmark: ModeBenchmark) -> Table:
    return table(
        benchmark.figures().items(),
        ("mode", lambda row: row[0].replace("_", " ")),
        (">goodput/s", lambda row: f"{row[1].goodput_rps:.2f}"),
        (">attainment", lambda row: percent(row[1].attainment)),
        (">GPU-hours", lambda row: f"{row[1].gpu_hours:.2f}"),
        (">switches/h", lambda row: f"{row[1].switches_per_h:.2f}"),
        (">TTFT p95", lambda row: seconds(row[1].ttft_p95_s)),
        (">ITL p95", lambda row: seconds(row[1].itl_p95_s)),
        (">failed", lambda row: f"{row[1].failed:.0f}"),
    )


def _gain(benchmark: ModeBenchmark) -> str:
    means = benchmark.figures()
    automatic = means[BY_LOAD]
    best = max((mean for name, mean in means.items() if name != BY_LOAD), key=lambda mean: mean.goodput_rps)
    gains = benchmark.gains
    text = f"Automatic switching: {sum(gains) / len(gains):+.1%} goodput over the best single mode"
    if len(gains) > 1:
        text += f" ({min(gains):+.1%} to {max(gains):+.1%} by seed)"
    gpu_time = automatic.gpu_hours / best.gpu_hours if best.gpu_hours else 1.0
    return f"{text}, with {gpu_time:.2f}x its GPU-hours"


@bench.command(
    help="Simulate requests for many LoRA adapters with Tidegate's router and placement, with least-loaded "
    "routing, and with Ray Serve's model multiplexing."
)
@number_option("--adapters", click.IntRange(1, 100_000), 1000, "Number of adapters.")
@number_option("--replicas", click.IntRange(1, 256), 4, "Number of replicas.")
@number_option("--slots", click.IntRange(1, 4096), 8, "Adapter slots per replica.")
@number_option("--exponent", FiniteFloat(0, 10), 1.0, "Zipf exponent N: adapter k has popularity k**-N.")
@number_option("--rate", FiniteFloat(0.001, 100_000), 100.0, "Requests per second, in total.")
@number_option("--burst-size", FiniteFloat(1, 100), 1.5, "Mean size of a burst for one adapter.")
@number_option("--requests", click.IntRange(1, 1_000_000), 12_000, "Number of requests.")
@seed_option(default=1)
@number_option("--seeds", click.IntRange(1, 1000), 1, "Number of seeds, from --seed on.")
@plot_option("a chart")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per seed.")
def adapters(
    *,
    adapters: int,
    replicas: int,
    slots: int,
    exponent: float,
    rate: float,
    burst_size: float,
    requests: int,
    seed: int,
    seeds: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    load = AdapterTraffic(
        adapters=adapters, exponent=exponent, rate=rate, requests=requests, burst_size=burst_size, seed=seed
    )
    with ProgressBar("requests") as bar:
        comparisons = compare_seeds(
            load,
            ReplicasAndSlots(replicas, slots),
            seeds,
            lambda name, sent: bar.update(sent, requests, task=name),
        )
    title = f"{adapters} adapters, Zipf exponent {exponent:g}, {replicas} replicas x {slots} slots, "
    title += f"{rate:g} requests/s in bursts of {burst_size:g}" + (f", {seeds} seeds" if seeds > 1 else "")
    if plot is not None:
        plot.write_text(_adapters_chart(title, comparisons, requests), encoding="utf-8")
    if as_json:
        for comparison in comparisons:
            print_json(comparison)
    else:
        console().print(_adapters_table(title, comparisons, requests))
        if plot is not None:
            click.echo(f"Chart written to {plot}")


def _mean(
    comparisons: Sequence[PlacementComparison], policy: str, value: Callable[[PlacementRunResult], float]
) -> float:
    return fmean(value(each.policies[policy]) for each in comparisons)


def _adapters_table(title: str, comparisons: Sequence[PlacementComparison], requests: int) -> Table:
    mean = partial(_mean, comparisons)
    return table(
        ROUTINGS,
        ("policy", lambda policy: policy),
        (">adapter loads", lambda policy: f"{mean(policy, lambda run: run.loads):.0f}"),
        (">loads/request", lambda policy: f"{mean(policy, lambda run: run.loads / requests):.3f}"),
        (">TTFT p95", lambda policy: f"{mean(policy, lambda run: 1e3 * run.ttft_p95_s):.1f} ms"),
        (">load max/mean", lambda policy: f"{mean(policy, lambda run: run.load_max_over_mean):.2f}"),
        (">moves/min", lambda policy: f"{mean(policy, lambda run: run.moves_per_min):.0f}"),
        title=title,
    )


def _adapters_chart(title: str, comparisons: Sequence[PlacementComparison], requests: int) -> str:
    def means(value: Callable[[PlacementRunResult], float]) -> list[float]:
        return [_mean(comparisons, policy, value) for policy in ROUTINGS]

    panels = (
        ChartPanel("adapter loads per request", means(lambda run: run.loads / requests)),
        ChartPanel("TTFT p95, ms", means(lambda run: 1e3 * run.ttft_p95_s)),
        ChartPanel("load, max/mean", means(lambda run: run.load_max_over_mean), BOUND),
    )
    return bars(title, [name.replace("_", " ") for name in ROUTINGS], panels)
