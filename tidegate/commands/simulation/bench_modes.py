"""``bench modes``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from rich.table import Table

from policy.errors import ConfigError
from sim.arrival import Arrival
from sim.benchmarks.modes import BY_LOAD, ModeBenchmark, compare
from sim.benchmarks.modes_chart import curves
from sim.charts.table import percent, seconds
from sim.results.comparison import PolicyEntry
from sim.results.series import clock
from sim.twin.record import Record
from sim.twin.run import simulate
from sim.workload.file import arrivals_of
from tidegate import document
from tidegate.commands.options import as_json, file_argument, plot_option, seed_option, trace_option
from tidegate.commands.simulation.policy_options import policy_entries, simulated_policy
from tidegate.commands.terminal import Bar, console, print_json, table, warn


@click.command(
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
    deployment = simulated_policy(document.load(file, ray=False).deployment)
    (automatic,) = policy_entries(deployment, [], warn)
    ends_at = max((arrival.at for arrival in arrivals_of(trace, seed)), default=None)
    if ends_at is None:
        raise ConfigError(str(trace), "no request", "at least one request")
    simulated_s = ends_at * seeds
    with Bar("simulated", clock) as bar:
        benchmark = compare(
            automatic,
            lambda each: arrivals_of(trace, each),
            _simulate,
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
    console().print(_table(benchmark))
    click.echo(_verdict(benchmark))
    if plot is not None:
        click.echo(f"Chart written to {plot}")


def _simulate(
    entry: PolicyEntry, arrivals: Iterable[Arrival], seed: int, progress: Callable[[float], None]
) -> Record:
    return simulate(entry.deployment, entry.policies, arrivals, seed=seed, progress=progress)


def _table(benchmark: ModeBenchmark) -> Table:
    rows = table(
        *(
            "mode",
            ">goodput/s",
            ">attainment",
            ">GPU-hours",
            ">switches/h",
            ">TTFT p95",
            ">ITL p95",
            ">failed",
        )
    )
    for name, mean in benchmark.figures().items():
        rows.add_row(
            name.replace("_", " "),
            f"{mean.goodput_rps:.2f}",
            percent(mean.attainment),
            f"{mean.gpu_hours:.2f}",
            f"{mean.switches_per_h:.2f}",
            seconds(mean.ttft_p95_s),
            seconds(mean.itl_p95_s),
            f"{mean.failed:.0f}",
        )
    return rows


def _verdict(benchmark: ModeBenchmark) -> str:
    means = benchmark.figures()
    automatic = means[BY_LOAD]
    best = max((mean for name, mean in means.items() if name != BY_LOAD), key=lambda mean: mean.goodput_rps)
    gains = benchmark.gains
    text = f"Automatic switching: {sum(gains) / len(gains):+.1%} goodput over the best single mode"
    if len(gains) > 1:
        text += f" ({min(gains):+.1%} to {max(gains):+.1%} by seed)"
    gpu_time = automatic.gpu_hours / best.gpu_hours if best.gpu_hours else 1.0
    return f"{text}, with {gpu_time:.2f}x its GPU-hours"
