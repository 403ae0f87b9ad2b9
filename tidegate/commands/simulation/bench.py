"""``bench``, and ``bench adapters``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import click
from rich.table import Table

from sim.benchmarks.adapters.benchmark import NAMES, Comparison, Fleet, compare_seeds, traffic
from sim.benchmarks.adapters.event_loop import RunOutcome
from sim.charts.bars import Panel, bars
from tidegate.commands.options import Real, number_option, plot_option, seed_option
from tidegate.commands.simulation.bench_modes import modes
from tidegate.commands.simulation.bench_policies import policies
from tidegate.commands.terminal import Bar, console, print_json, table

# The router's bound on a replica's load, in units of the mean load.
BOUND = 1.25


@click.group(help="Compare policies on simulated replicas.")
def bench() -> None:
    """The group; no deployment has to run."""


bench.add_command(policies)
bench.add_command(modes)


@bench.command(
    help="Simulate requests for many LoRA adapters with Tidegate's router and placement, with least-loaded "
    "routing, and with Ray Serve's model multiplexing."
)
@number_option("--adapters", click.IntRange(1, 100_000), 1000, "Number of adapters.")
@number_option("--replicas", click.IntRange(1, 256), 4, "Number of replicas.")
@number_option("--slots", click.IntRange(1, 4096), 8, "Adapter slots per replica.")
@number_option("--exponent", Real(0, 10), 1.0, "Zipf exponent N: adapter k has popularity k**-N.")
@number_option("--rate", Real(0.001, 100_000), 100.0, "Requests per second, in total.")
@number_option("--together", Real(1, 100), 1.5, "Mean size of a burst for one adapter.")
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
    together: float,
    requests: int,
    seed: int,
    seeds: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    load = traffic(
        adapters=adapters, exponent=exponent, rate=rate, requests=requests, together=together, seed=seed
    )
    with Bar("requests") as bar:
        comparisons = compare_seeds(
            load, Fleet(replicas, slots), seeds, lambda name, sent: bar.update(sent, requests, task=name)
        )
    title = f"{adapters} adapters, Zipf exponent {exponent:g}, {replicas} replicas x {slots} slots, "
    title += f"{rate:g} requests/s in bursts of {together:g}" + (f", {seeds} seeds" if seeds > 1 else "")
    if plot is not None:
        plot.write_text(_plot(title, comparisons, requests), encoding="utf-8")
    if as_json:
        for comparison in comparisons:
            print_json(comparison)
    else:
        console().print(_table(title, comparisons, requests))
        if plot is not None:
            click.echo(f"Chart written to {plot}")


def _means(comparisons: Sequence[Comparison], value: Callable[[RunOutcome], float]) -> list[float]:
    """The mean over the seeds, for each policy."""
    return [fmean(value(each.policies[name]) for each in comparisons) for name in NAMES]


def _table(title: str, comparisons: Sequence[Comparison], requests: int) -> Table:
    rows = table(
        *("policy", ">adapter loads", ">loads/request", ">TTFT p95", ">load max/mean", ">moves/min"),
        title=title,
    )
    columns = (
        [f"{mean:.0f}" for mean in _means(comparisons, lambda run: run.loads)],
        [f"{mean:.3f}" for mean in _means(comparisons, lambda run: run.loads / requests)],
        [f"{mean:.1f} ms" for mean in _means(comparisons, lambda run: 1e3 * run.ttft_p95_s)],
        [f"{mean:.2f}" for mean in _means(comparisons, lambda run: run.load_max_over_mean)],
        [f"{mean:.0f}" for mean in _means(comparisons, lambda run: run.moves_per_min)],
    )
    for row in zip(NAMES, *columns, strict=True):
        rows.add_row(*row)
    return rows


def _plot(title: str, comparisons: Sequence[Comparison], requests: int) -> str:
    panels = (
        Panel("adapter loads per request", _means(comparisons, lambda run: run.loads / requests)),
        Panel("TTFT p95, ms", _means(comparisons, lambda run: 1e3 * run.ttft_p95_s)),
        Panel("load, max/mean", _means(comparisons, lambda run: run.load_max_over_mean), BOUND),
    )
    return bars(title, [name.replace("_", " ") for name in NAMES], panels)
