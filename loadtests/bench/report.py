"""The results as Markdown and as charts, from the JSON files of the parts."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from loadtests.bench.median_and_range import MedianAndRange, table
from loadtests.bench.parts.cost import SoakResult, SystemCost
from loadtests.bench.parts.failing import FailureResult
from loadtests.bench.parts.latency import LatencyResults
from loadtests.bench.parts.routing import RoutingResult
from loadtests.bench.parts.token_cost import TokenCost as Token
from sim.charts.figure_style import ChartPanel, bars


def plot(title: str, panels: Mapping[str, Mapping[str, MedianAndRange]]) -> str:
    """Bars with ranges as an SVG; systems whose names begin with ``tidegate`` have their own colour."""
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    missing = MedianAndRange(math.nan, math.nan, math.nan)
    rows = {title: [figures.get(name, missing) for name in names] for title, figures in panels.items()}
    return bars(
        title,
        names,
        [
            ChartPanel(name, [each.median for each in row], ranges=[(each.low, each.high) for each in row])
            for name, row in rows.items()
        ],
        ours=[name for name in names if name.startswith("tidegate")],
    )


class ReportPart(msgspec.Struct, kw_only=True):
    """One part's file: what was measured, when, where and how."""

    part: str
    at: str
    command: str
    machine: str
    versions: dict[str, str]
    rounds: int
    left_out: dict[str, str]
    results: Any


def store(
    folder: Path,
    part: str,
    command: str,
    *,
    versions: dict[str, str],
    left_out: dict[str, str],
    rounds: int,
    results: object,
) -> None:
    """Write the file of one part, measured on this machine now, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    made = ReportPart(
        part=part,
        at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=command,
        machine=f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        versions={"python": platform.python_version(), "uvloop": metadata.version("uvloop"), **versions},
        left_out=left_out,
        rounds=rounds,
        results=msgspec.to_builtins(results),
    )
    (folder / f"{part}.json").write_bytes(msgspec.json.format(msgspec.json.encode(made)))


def cost(results: Any) -> str:
    costs = msgspec.convert(results, dict[str, SystemCost])
    head = ["system", "us/request", "at 32 KB", "at 240 KB", "us/chunk, 32 streams", "128 streams",
            "peak MiB", "cold start s"]  # fmt: skip
    rows = []
    for name, each in costs.items():
        requests = (each.small_us, each.kb32_us, each.kb240_us)
        chunks = (each.chunk32_us, each.chunk128_us)
        figures = [figure.text() for figure in requests] + [figure.text(1) for figure in chunks]
        rows.append([name, *figures, f"{each.peak / 2**20:.0f}", f"{each.cold_start_s:.2f}"])
    return table(head, rows)


def latency(results: Any) -> str:
    measured = msgspec.convert(results, LatencyResults)
    text = (
        f"Streams of {measured.chunks} chunks; 100 % are the {measured.capacity:.0f} streams/s that a core "
        f"carries with {measured.slowest}.\n\n"
    )
    head = ["system"]
    for level in measured.cells:
        head += [f"TTFT p50 at {level}", "p99", "ITL p99"]
    names = list(dict.fromkeys(name for cells in measured.cells.values() for name in cells))
    rows = []
    for name in names:
        row = [name]
        for cells in measured.cells.values():
            each = cells[name]
            row += [each.added_p50.text(2, 1e3), each.added_p99.text(1, 1e3), each.itl_p99.text(1, 1e3)]
        rows.append(row)
    bare = ["no gateway"]
    for figure in measured.itl_direct_p99.values():
        bare += ["", "", figure.text(1, 1e3)]
    return text + table(head, [*rows, bare])


def routing(results: Any) -> str:
    return _routed(
        results,
        ("home", "pairs", "cold", "least possible"),
        lambda each: [
            *(each.home.text(2), each.pairs.text(), each.cold.text()),
            each.least.text() if each.least.high else "-",
        ],
    )


def adapters(results: Any) -> str:
    return _routed(results, ("loads",), lambda each: [each.loads.text()])


def _routed(results: Any, head: Sequence[str], counts: Callable[[RoutingResult], list[str]]) -> str:
    """A table for each scene: what was counted, how even it was, and the times to the first token."""
    scenes = msgspec.convert(results, dict[str, dict[str, RoutingResult]])
    text = ""
    for scene, systems in scenes.items():
        rows = [
            [name, *counts(each), each.balance.text(2)]
            + [figure.text(1, 1e3) for figure in (each.mean, each.p50, each.p99)]
            for name, each in systems.items()
        ]
        columns = ("system", *head, "max/mean", "TTFT mean ms", "p50", "p99")
        text += f"{scene}:\n\n{table(columns, rows)}\n"
    return text


def failing(results: Any) -> str:
    scenes = msgspec.convert(results, dict[str, dict[str, FailureResult]])
    head = ["system", "replica", "failed", "with an error", "TTFT p50 ms", "p99"]
    rows = [
        [name, scene, each.failed.text(), each.reported.text(), each.p50.text(0, 1e3), each.p99.text(0, 1e3)]
        for scene, systems in scenes.items()
        for name, each in systems.items()
    ]
    return table(head, rows)


def soak(results: Any) -> str:
    measured = msgspec.convert(results, SoakResult)
    start, quarter, end = (measured.memory[i] / 2**20 for i in (0, len(measured.memory) // 4, -1))
    head = ["requests", "MiB at first", "at a quarter", "at the end", "bytes/request after a quarter"]
    row = [str(measured.requests[-1]), f"{start:.1f}", f"{quarter:.1f}", f"{end:.1f}"]
    row += [f"{measured.bytes_per_request:.2f}", f"{measured.cpu_us:.0f}"]
    return table([*head, "us/request"], [row])


def token(results: Any) -> str:
    """A table for each number of streams."""
    text = ""
    for streams, ways in msgspec.convert(results, dict[str, dict[str, Token]]).items():
        rows = [
            [name]
            + [figure.text(1) for figure in (each.gateway_us, each.front_us, each.surround_us)]
            + [
                each.surround_ratio.text(2),
                each.chunk_us.text(1),
                each.engine_us.text(),
                each.other_us.text(1),
            ]
            + [each.tokens_per_s.text(), each.throughput_ratio.text(2), each.chunks.text(2)]
            + [each.ttft_p50.text(0, 1e3), each.ttft_p99.text(0, 1e3)]
            + [each.itl_p50.text(1, 1e3), each.itl_p99.text(1, 1e3)]
            for name, each in ways.items()
        ]
        head = ["way", "gateway us/token", "front", "both", "to vLLM's", "both us/chunk", "engine us/token",
                "other", "tokens/s", "to vLLM's", "chunks/token", "TTFT p50 ms", "p99", "ITL p50 ms",
                "p99"]  # fmt: skip
        text += f"{streams} streams:\n\n{table(head, rows)}\n"
    return text


PARTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "cost": ("Processor time, memory, cold start", cost),
    "latency": ("Added latency, ms", latency),
    "routing": ("Routing by prefix", routing),
    "adapters": ("Routing by adapter", adapters),
    "failing": ("One replica of four slow or killed", failing),
    "soak": ("Memory", soak),
    "token": ("A streamed token", token),
}


def _cost_plot(results: Any) -> str:
    costs = msgspec.convert(results, dict[str, SystemCost])
    return plot(
        "Processor time of the gateway, microseconds (median and range of the rounds)",
        {
            "per request of 110 B": {name: each.small_us for name, each in costs.items()},
            "per request of 240 KB": {name: each.kb240_us for name, each in costs.items()},
            "per chunk, 32 streams": {name: each.chunk32_us for name, each in costs.items()},
        },
    )


def _routing_plot(results: Any) -> str:
    scenes = msgspec.convert(results, dict[str, dict[str, RoutingResult]])
    return plot(
        "Mean time to the first token, ms (median and range of the rounds)",
        {
            scene: {name: each.mean.times(1e3) for name, each in systems.items()}
            for scene, systems in scenes.items()
        },
    )


def _token_plot(results: Any) -> str:
    return plot(
        "Processor time of a streamed token around the engine, microseconds (median and range of the rounds)",
        {
            f"{streams} streams": {name: each.surround_us for name, each in ways.items()}
            for streams, ways in msgspec.convert(results, dict[str, dict[str, Token]]).items()
        },
    )


PLOTS: dict[str, Callable[[Any], str]] = {
    "cost": _cost_plot,
    "routing": _routing_plot,
    "token": _token_plot,
}


def write(folder: Path) -> None:
    """``table.md`` and the plots, from the parts' files in ``folder``."""
    text = ""
    for name, (title, render) in PARTS.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        part = msgspec.json.decode(path.read_bytes(), type=ReportPart)
        text += f"### {title}\n\n{render(part.results)}\n"
        versions = ", ".join(f"{what} {version}" for what, version in part.versions.items())
        text += f"`{part.command}`, {part.at}, {part.machine}, {part.rounds} rounds; {versions}."
        if part.left_out:
            text += " Left out: " + ", ".join(f"{what} ({why})" for what, why in part.left_out.items()) + "."
        text += "\n\n"
        if name in PLOTS:
            (folder / f"{name}.svg").write_text(PLOTS[name](part.results))
    (folder / "table.md").write_text(text)
