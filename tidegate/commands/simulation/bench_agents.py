"""``bench agents``: routers compared on sessions of agents, on simulated replicas."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import click
import msgspec

from sim.benchmarks.agents.benchmark import (
    CACHES,
    LOADS,
    ROUTERS,
    AgentBenchmarkSetup,
    AgentRunResult,
    AgentTrial,
    LoadAndCacheSize,
    mean_outcome,
    run_trials,
)
from sim.charts.figure_style import ChartPanel, bars
from tidegate.commands.options import (
    CommaSeparated,
    FiniteFloat,
    as_json,
    number_between,
    number_option,
    plot_option,
    seed_option,
)
from tidegate.commands.terminal import ProgressBar, console, print_json, table
from tidegate.commands.units import plural


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of each router at a load and with a cache of this size, by name."""

    load: float
    cache: float
    routers: dict[str, AgentRunResult]


def _router_name(text: str) -> str:
    if text not in ROUTERS:
        raise ValueError
    return text


@click.command(
    help="Simulate sessions of agents (many turns, tool calls, subagents) with Tidegate's router and with "
    "those of other gateways. Shown are TTFT and the prompt tokens that were computed more than once."
)
@click.option(
    "--loads", type=CommaSeparated("FACTOR,...", number_between(0, 2), "numbers above 0 and up to 2"),
    default=",".join(map(str, LOADS)), show_default=True,
    help="Loads in units of the capacity, that of full batches that compute no token twice.",
)  # fmt: skip
@click.option(
    "--caches", type=CommaSeparated("FACTOR,...", number_between(0, 10), "numbers above 0 and up to 10"),
    default=",".join(map(str, CACHES)), show_default=True,
    help="Sizes of all KV caches together, in units of the tokens of the sessions open at that load.",
)  # fmt: skip
@click.option(
    "--routers", type=CommaSeparated("NAME,...", _router_name, f"some of {', '.join(ROUTERS)}"),
    default=",".join(ROUTERS), help="Routers to compare; default: all.",
)  # fmt: skip
@number_option("--replicas", click.IntRange(1, 256), AgentBenchmarkSetup().replicas, "Number of replicas.")
@number_option(
    "--duration", FiniteFloat(1, 1e6), AgentBenchmarkSetup().duration_s, "Seconds in which sessions arrive."
)
@seed_option()
@number_option("--seeds", click.IntRange(1, 1000), 1, "Number of seeds, from --seed on.")
@click.option("--processes", type=click.IntRange(1, 256), help="Parallel processes; default: one per core.")
@plot_option("a chart")
@as_json
def agents(
    *,
    loads: tuple[float, ...],
    caches: tuple[float, ...],
    routers: tuple[str, ...],
    replicas: int,
    duration: float,
    seed: int,
    seeds: int,
    processes: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    setup = AgentBenchmarkSetup(replicas=replicas, duration_s=duration)
    cells = [LoadAndCacheSize(load, cache) for cache, load in product(caches, loads)]
    trials = [
        AgentTrial(setup, cell, seed + i, router)
        for cell in cells
        for router in routers
        for i in range(seeds)
    ]
    with ProgressBar("runs") as bar:
        outcomes = run_trials(trials, processes, lambda trial: bar.advance(len(trials), "agents"))
    found = dict(zip(trials, outcomes, strict=True))
    results = [
        CellResult(
            load=cell.load,
            cache=cell.cache,
            routers={
                name: mean_outcome([found[AgentTrial(setup, cell, seed + i, name)] for i in range(seeds)])
                for name in routers
            },
        )
        for cell in cells
    ]
    title = f"sessions of agents on {plural(replicas, 'replica')}, {duration:g} s, {plural(seeds, 'seed')}"
    if plot is not None:
        plot.write_text(_chart(title, results), encoding="utf-8")
    if as_json:
        print_json({"replicas": replicas, "duration_s": duration, "seeds": seeds, "cells": results})
        return
    for result in results:
        _print(result)
    if plot is not None:
        click.echo(f"Chart written to {plot}")


def _print(result: CellResult) -> None:
    routers: Mapping[str, AgentRunResult] = result.routers
    console().print(
        table(
            routers.items(),
            ("router", lambda row: row[0]),
            (">TTFT p95", lambda row: f"{row[1].ttft_p95_s:.3f} s"),
            (">TTFT mean", lambda row: f"{row[1].ttft_mean_s:.3f} s"),
            (">computed twice", lambda row: f"{row[1].computed_twice:.1%}"),
            (">requests", lambda row: f"{row[1].requests}"),
            title=_cell_name(result),
        )
    )


def _cell_name(result: CellResult) -> str:
    return f"load {result.load:g}, cache {result.cache:g}"


def _chart(title: str, results: list[CellResult]) -> str:
    rows = [(result, name) for result in results for name in result.routers]
    labels = [f"{result.load:g} / {result.cache:g} {name.replace('_', ' ')}" for result, name in rows]
    ours = [label for label, (_, name) in zip(labels, rows, strict=True) if name == "tidegate"]
    panels = (
        ChartPanel("TTFT p95, s", [result.routers[name].ttft_p95_s for result, name in rows]),
        ChartPanel("computed twice", [result.routers[name].computed_twice for result, name in rows]),
    )
    return bars(f"{title} (load / cache)", labels, panels, ours)
