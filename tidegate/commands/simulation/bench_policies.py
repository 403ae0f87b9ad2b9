"""``bench policies``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from policy.errors import ConfigError, TargetError
from policy.scaling.policies.registry import NAMES
from sim.benchmarks.policies.all_runs import run_all, trials
from sim.benchmarks.policies.chart import chart
from sim.benchmarks.policies.ranking import Ranking, RankingTable, rank
from sim.benchmarks.policies.run import Trial, TrialResult
from sim.benchmarks.policies.setup import TraceHalf, setup_of
from sim.benchmarks.policies.sizing import ReplicaSize, size_of
from tidegate.commands.options import Listed, OutputFile, as_json, number_between
from tidegate.commands.terminal import Bar, console, print_json, table, warn
from tidegate.commands.units import plural

_SUFFIXES = (".csv", ".jsonl", ".gz")
# With --quick: one seed, and every third setting.
_QUICK = 3


class PolicyScore(msgspec.Struct, frozen=True, kw_only=True):
    """The ranking of policies on one trace."""

    trace: str
    half: str
    seeds: int
    profile: str
    size: ReplicaSize
    table: RankingTable


def _policy_name(text: str) -> str:
    if text not in NAMES:
        raise ValueError
    return text


@click.command(
    help="Simulate every scaling policy at many settings on traces, and compare its GPU-hours at the same "
    "SLO attainment with the offline optimum, a plan that knows the future."
)
@click.option(
    "--traces", "where", type=click.Path(path_type=Path), required=True, envvar="TIDEGATE_TRACES",
    show_envvar=True, help="A trace, or a folder of traces.",
)  # fmt: skip
@click.option(
    "--leads", type=Listed("SECONDS,...", number_between(0, 3600), "seconds above 0 and up to 3600"),
    default="30,120", show_default=True, help="Start-up times of replicas, in seconds.",
)  # fmt: skip
@click.option("--seeds", type=click.IntRange(1, 100), default=5, show_default=True, help="Number of seeds.")
@click.option(
    "--half", type=click.Choice([str(each) for each in TraceHalf]), default=str(TraceHalf.JUDGE),
    show_default=True, help="First or second half of each trace; defaults were tuned on the first.",
)  # fmt: skip
@click.option(
    "--policies", "names", type=Listed("NAME,...", _policy_name, f"some of {', '.join(NAMES)}"),
    default=",".join(NAMES), help="Policies to compare; default: all.",
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
    leads: tuple[float, ...],
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
    scores = []
    for trace in traces:
        setup = setup_of(trace, TraceHalf(half))
        warn(f"{trace.name}: measuring the capacity of a replica")
        try:
            size = size_of(setup, leads[0])
            settings = trials(
                setup, size, names, leads_s=leads, seeds=range(count), each=_QUICK if quick else 1
            )
            ranking = rank(_run(trace.name, settings, processes))
        except ValueError as error:
            raise TargetError(f"{trace.name}: {error}") from None
        score = PolicyScore(
            trace=trace.name, half=half, seeds=count, profile=setup.profile, size=size, table=ranking
        )
        scores.append(score)
        if plot is not None:
            path = plot if len(traces) == 1 else plot.with_stem(f"{plot.stem}-{trace.stem}")
            path.write_text(chart(_title(score), ranking, setup.attainment), encoding="utf-8")
            warn(f"Chart written to {path}")
        if not as_json:
            _print(score)
    if as_json:
        print_json({"traces": scores})


def _run(name: str, settings: Sequence[Trial], processes: int | None) -> list[TrialResult]:
    with Bar("runs") as bar:
        return run_all(settings, processes, lambda _: bar.advance(len(settings), task=name))


def _traces(where: Path) -> list[Path]:
    if where.is_file():
        return [where]
    traces = sorted(path for path in where.glob("*") if path.suffix in _SUFFIXES) if where.is_dir() else []
    if not traces:
        raise ConfigError(
            "--traces", str(where), f"a trace, or a folder with files in {', '.join(_SUFFIXES)}"
        )
    return traces


def _title(score: PolicyScore) -> str:
    half = "first half" if score.half == TraceHalf.TUNE else "second half"
    load = f"load x {score.size.factor:g} on {score.profile}"
    return f"{score.trace}, {half}, {load}, {plural(score.seeds, 'seed')}"


def _print(score: PolicyScore) -> None:
    for oracle in score.table.oracles:
        rows = table(
            *("policy", ">GPU-hours at 99 %", ">x optimum", ">x optimum by seed", ">x lower bound"),
            *(">attainment", ">goodput per GPU-hour", ">TTFT p99", ">recovery", ">switches"),
            *(">forecast error, GPU-h", ">start-up time, GPU-h", ">rounding up, GPU-h"),
            title=f"{_title(score)}, start-up time {oracle.lead_s:g} s\n"
            f"offline optimum: {oracle.gpu_hours:.2f} GPU-hours simulated ({oracle.plan_gpu_hours:.2f} "
            f"planned, lower bound {oracle.lower_gpu_hours:.2f}), {oracle.replicas:.1f} replicas, "
            f"{oracle.attainment:.2%} attainment",
        )
        for ranking in score.table.standings:
            if ranking.lead_s == oracle.lead_s:
                rows.add_row(*_row(ranking))
        console().print(rows)


def _row(ranking: Ranking) -> tuple[str, ...]:
    def number(value: float | None, digits: int = 2, unit: str = "") -> str:
        return "-" if value is None else f"{value:.{digits}f}{unit}"

    spread = "-" if ranking.least_ratio is None else f"{ranking.least_ratio:.2f}-{ranking.most_ratio:.2f}"
    regret = ranking.regret
    parts_s = (
        (None, None, None) if regret is None else (regret.forecast_s, regret.lead_s, regret.integrality_s)
    )
    return (
        ranking.policy,
        number(ranking.gpu_hours),
        number(ranking.oracle_ratio),
        spread,
        number(ranking.lower_ratio),
        f"{ranking.attainment:.2%}",
        f"{ranking.goodput_per_gpu_hour:.0f}",
        number(ranking.ttft_p99_s, unit=" s"),
        number(ranking.recovery_s, 0, " s"),
        number(ranking.switches, 0),
        *("-" if part_s is None else number(part_s / 3600) for part_s in parts_s),
    )
