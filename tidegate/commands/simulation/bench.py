"""``bench``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import msgspec
from rich.progress import MofNCompleteColumn
from rich.table import Table

from sim.benchmarks.adapters.benchmark import NAMES, Comparison, Fleet, compare_seeds, traffic
from sim.benchmarks.adapters.event_loop import RunOutcome
from sim.charts.bars import Panel, bars
from tidegate.commands.simulation.bench_modes import modes
from tidegate.commands.simulation.bench_policies import policies
from tidegate.commands.terminal import Bar, console, moving

# The load that no replica should have more of, in units of the mean.
BOUND = 1.25


class Real(click.FloatRange):
    """A finite number within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return found


@click.group(help="Measure policies on the simulated engine, beside others.")
def bench() -> None:
    """The group; nothing needs to run."""


bench.add_command(policies)
bench.add_command(modes)


@bench.command(
    help="Play requests for many LoRA adapters against a simulated fleet: with Tidegate's router and "
    "placement, with the least loaded replica, and with Ray Serve's multiplexing rule."
)
@click.option("--adapters", type=click.IntRange(1, 100_000), default=1000, help="How many there are.")
@click.option("--replicas", type=click.IntRange(1, 256), default=4, help="How many replicas serve them.")
@click.option("--slots", type=click.IntRange(1, 4096), default=8, help="Adapters that one replica holds.")
@click.option(
    "--exponent", type=Real(0, 10), default=1.0, help="Of Zipf's law: the k-th is asked for k**-N as often."
)
@click.option("--rate", type=Real(0.001, 100_000), default=100.0, help="Requests per second of the fleet.")
@click.option(
    "--together", type=Real(1, 100), default=1.5, help="Requests for one adapter at once, on average."
)
@click.option("--requests", type=click.IntRange(1, 1_000_000), default=12_000, help="How many are played.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=1, help="Random seed.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, help="Number of seeds, from --seed on.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot there, as SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per seed.")
def adapters(
    *,
    adapters: int,
    replicas: int,
    slots: int,
    exponent: float,
    rate: float,
    together: float,
    requests: int,
    seed: int,
    seeds: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    if plot is not None and not plot.absolute().parent.is_dir():
        raise click.BadParameter(f"{plot}: expected a file in a folder that exists", param_hint="--plot")
    asked = traffic(
        adapters=adapters, exponent=exponent, rate=rate, requests=requests, together=together, seed=seed
    )
    with _Bar(requests) as bar:
        found = compare_seeds(asked, Fleet(replicas, slots), seeds, bar)
    title = f"{adapters} adapters, Zipf {exponent:g}, {replicas} x {slots} slots, {rate:g} requests/s"
    title += f" in calls of {together:g}" + (f", {seeds} seeds" if seeds > 1 else "")
    if plot is not None:
        plot.write_text(_plot(title, found, requests), encoding="utf-8")
    if as_json:
        for each in found:
            click.echo(msgspec.json.encode(each).decode())
    else:
        console().print(_table(title, found, requests))
        if plot is not None:
            click.echo(f"The plot is in {plot}")


class _Bar(Bar):
    """How far each policy is, on standard error: a bar on a terminal, a line for each policy elsewhere."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        super().__init__(moving(16, MofNCompleteColumn()))
        self._tasks = {name: self._bar.add_task(name, total=requests) for name in NAMES}

    def __call__(self, name: str, sent: int) -> None:
        self._bar.update(self._tasks[name], completed=sent)
        if self._bar.disable and sent == self._requests:
            click.echo(f"{name}: {sent} requests", err=True)


def _mean(found: Sequence[Comparison], value: Callable[[RunOutcome], float]) -> list[float]:
    """The mean over the seeds, for each policy."""
    return [fmean(value(each.policies[name]) for each in found) for name in NAMES]


def _table(title: str, found: Sequence[Comparison], requests: int) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    table.add_column("policy")
    for column in ("loads", "per request", "TTFT p95 ms", "load max/mean", "moves a minute"):
        table.add_column(column, justify="right")
    columns = (
        [f"{value:.0f}" for value in _mean(found, lambda each: each.loads)],
        [f"{value:.3f}" for value in _mean(found, lambda each: each.loads / requests)],
        [f"{value:.1f}" for value in _mean(found, lambda each: 1e3 * each.ttft_p95_s)],
        [f"{value:.2f}" for value in _mean(found, lambda each: each.load_max_over_mean)],
        [f"{value:.0f}" for value in _mean(found, lambda each: each.moves_per_min)],
    )
    for row in zip(NAMES, *columns, strict=True):
        table.add_row(*row)
    return table


def _plot(title: str, found: Sequence[Comparison], requests: int) -> str:
    panels = (
        Panel("loads of adapters per request", _mean(found, lambda each: each.loads / requests)),
        Panel("TTFT p95, ms", _mean(found, lambda each: 1e3 * each.ttft_p95_s)),
        Panel("load, max/mean", _mean(found, lambda each: each.load_max_over_mean), BOUND),
    )
    return bars(title, [name.replace("_", " ") for name in NAMES], panels)
