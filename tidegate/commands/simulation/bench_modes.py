"""``bench modes``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
import msgspec
from rich.progress import TaskID, TextColumn
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
from tidegate.commands.simulation.policy_options import policy_entries, simulated_policy
from tidegate.commands.terminal import FILE, Bar, console, moving, trace_option


@click.command(
    help="Replay a trace on the deployment in FILE, whose load decides the mode, and on each of its modes "
    "alone with all the replicas that it may have."
)
@click.argument("file", type=FILE)
@trace_option(required=True)
@click.option("--seeds", type=click.IntRange(1, 100), default=3, help="How many times, each by other chance.")
@click.option("--seed", type=click.IntRange(0, 2**32), default=0, help="The first of the seeds.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot there, as SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def modes(*, file: Path, trace: Path, seeds: int, seed: int, plot: Path | None, as_json: bool) -> None:
    if plot is not None and not plot.absolute().parent.is_dir():
        raise click.BadParameter(f"{plot}: expected a file in a folder that exists", param_hint="--plot")
    deployment = simulated_policy(document.load(file, ray=False).deployment)
    (ours,) = policy_entries(deployment, [], lambda event: click.echo(event, err=True))
    ends_at = max((arrival.at for arrival in arrivals_of(trace, seed)), default=None)
    if ends_at is None:
        raise ConfigError(str(trace), "no request", "a request at least")
    chances = range(seed, seed + seeds)
    with _Bars(ends_at * seeds) as bars:
        found = compare(ours, lambda each: arrivals_of(trace, each), _play, chances, bars)
    title = f"{trace.name} on {file.name}: requests a second within the objective, seed {seed}"
    if plot is not None:
        first = {name: row[0] for name, row in found.trials.items()}
        plot.write_text(curves(title, first), encoding="utf-8")
    if as_json:
        click.echo(msgspec.json.encode({"trace": trace.name, **found.plain()}).decode())
        return
    console().print(_table(found))
    click.echo(_verdict(found))
    if plot is not None:
        click.echo(f"The plot is in {plot}")


def _play(
    contender: PolicyEntry, asked: Iterable[Arrival], seed: int, said: Callable[[float], None]
) -> Record:
    return simulate(contender.deployment, contender.policies, asked, seed=seed, said=said)


class _Bars(Bar):
    """How far each contender is, over all seeds, on standard error: bars, or a line each where none moves."""

    def __init__(self, ends_at: float) -> None:
        self._ends_at = ends_at
        self._tasks: dict[str, TaskID] = {}
        self._last = ""
        super().__init__(moving(16, TextColumn("{task.fields[now]} of {task.fields[end]}")))

    def __call__(self, name: str, at: float) -> None:
        """``name`` has come as far as the instant ``at``."""
        if self._bar.disable:
            if name != self._last:
                self._last = name
                click.echo(f"{name}: {clock(self._ends_at)} are simulated", err=True)
            return
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(
                name, total=self._ends_at, now=clock(0.0), end=clock(self._ends_at)
            )
        self._bar.update(self._tasks[name], completed=min(at, self._ends_at), now=clock(at))


def _table(found: ModeBenchmark) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("mode")
    for heading in ("goodput/s", "attainment", "GPU-hours", "switches/h", "TTFT p95", "ITL p95", "failed"):
        table.add_column(heading, justify="right")
    for name, each in found.figures().items():
        table.add_row(
            name.replace("_", " "),
            f"{each.goodput_rps:.2f}",
            percent(each.attainment),
            f"{each.gpu_hours:.2f}",
            f"{each.switches_per_h:.2f}",
            seconds(each.ttft_p95_s),
            seconds(each.itl_p95_s),
            f"{each.failed:.0f}",
        )
    return table


def _verdict(found: ModeBenchmark) -> str:
    figures = found.figures()
    ours, others = figures[BY_LOAD], [each for name, each in figures.items() if name != BY_LOAD]
    better = max(others, key=lambda each: each.goodput_rps)
    gains = found.gains
    said = f"By load: {sum(gains) / len(gains):+.1%} goodput over the better mode alone"
    if len(gains) > 1:
        said += f" ({min(gains):+.1%} to {max(gains):+.1%} by seed)"
    held = ours.gpu_hours / better.gpu_hours if better.gpu_hours else 1.0
    return f"{said}, with {held:.2f} times its GPU time"
