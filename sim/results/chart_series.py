"""Chart data of one model under one policy, reduced to the resolution of a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policy.scaling.decision_types import Decision
from sim.simulator.run_record import (
    Floats,
    Ints,
    ModelTickSample,
    RequestColumns,
    RunRecord,
    finite_quantiles,
)

# A column of the report is about as many pixels wide.
WINDOWS = 480
# A 99th percentile needs more requests than a mean does.
LATENCY_WINDOWS = 120
MARKS = 160
# Decisions of one mark that are shown in full.
MAX_DECISIONS = 4
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class QuantileSeries:
    """p50, p90 and p99 in seconds of the requests that arrived in each window of ``width_s``."""

    width_s: float
    p50: Floats
    p90: Floats
    p99: Floats


@dataclass(frozen=True, slots=True)
class ChartAnnotation:
    """The decisions at about ``at``; those within a few seconds share one mark."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class ModeInterval:
    """The model is in ``mode`` from ``start`` to ``end``."""

    mode: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ChartData:
    """One model from 0 to ``ends_at`` seconds in windows of ``width_s``; NaN where a window is empty.

    ``arrivals`` and ``met`` are means over a window, ``queued`` and ``running`` maxima, replica counts the
    last values.
    """

    model: str
    ends_at: float
    width_s: float
    arrivals: Floats
    queued: Floats
    running: Floats
    met: Floats
    ready: Floats
    starting: Floats
    draining: Floats
    wanted: Floats
    ttft: QuantileSeries
    itl: QuantileSeries
    stays: tuple[ModeInterval, ...]
    marks: tuple[ChartAnnotation, ...]


def chart_data(record: RunRecord) -> tuple[ChartData, ...]:
    """The chart data of each model of the run, in the order of its requests."""
    return tuple(_picture(record, model, requests) for model, requests in record.requests.items())


def _picture(record: RunRecord, model: str, requests: RequestColumns) -> ChartData:
    moments = [moment for moment in record.moments if moment.model == model]
    end = max(record.ends_at, 1e-9)
    # No window without a tick in it.
    count = max(1, min(WINDOWS, len(moments)))
    at = np.array([moment.at for moment in moments], dtype=np.float64)
    where = np.clip((at * (count / end)).astype(np.int64), 0, count - 1)

    def column(name: str) -> Floats:
        return np.array([getattr(moment, name) for moment in moments], dtype=np.float64)

    return ChartData(
        model=model,
        ends_at=end,
        width_s=end / count,
        **{name: _means(column(name), where, count) for name in ("arrivals", "met")},
        **{name: _most(column(name), where, count) for name in ("queued", "running")},
        **{name: _last(column(name), where, count) for name in ("ready", "starting", "draining", "wanted")},
        ttft=_band(requests.at, requests.ttft_s, end),
        itl=_band(requests.at, requests.itl_s, end),
        stays=_stays(moments, end),
        marks=_marks([(at, each) for at, each in record.decisions if each.model == model], end),
    )


def _means(values: Floats, where: Ints, count: int) -> Floats:
    known = np.isfinite(values)
    sums = np.bincount(where[known], values[known], count)
    counts = np.bincount(where[known], minlength=count)
    means: Floats = np.divide(sums, counts, out=np.full(count, np.nan), where=counts > 0)
    return means


def _most(values: Floats, where: Ints, count: int) -> Floats:
    most = np.full(count, -np.inf)
    np.maximum.at(most, where, values)
    most[np.isneginf(most)] = np.nan
    return most


def _last(values: Floats, where: Ints, count: int) -> Floats:
    """The last value of each window, or of the one before it."""
    last = np.full(count, np.nan)
    last[where] = values
    known = np.where(np.isnan(last), 0, np.arange(count))
    filled: Floats = last[np.maximum.accumulate(known)]
    return filled


def _band(at: Floats, values: Floats, end: float) -> QuantileSeries:
    count = max(1, min(LATENCY_WINDOWS, len(at)))
    edges = np.searchsorted(at, np.linspace(0.0, end, count + 1))
    edges[-1] = len(at)
    found = np.full((count, len(QUANTILES)), np.nan)
    for i in range(count):
        found[i] = finite_quantiles(values[edges[i] : edges[i + 1]], QUANTILES)
    return QuantileSeries(end / count, *found.T)


def _stays(moments: Sequence[ModelTickSample], end: float) -> tuple[ModeInterval, ...]:
    begun: list[tuple[str, float]] = []
    for moment in moments:
        if not begun or begun[-1][0] != moment.mode:
            begun.append((moment.mode, moment.at))
    if begun:  # The first tick is a little after the start.
        begun[0] = (begun[0][0], 0.0)
    ends = [*(start for _, start in begun[1:]), end]
    return tuple(ModeInterval(mode, start, until) for (mode, start), until in zip(begun, ends, strict=False))


def _marks(decisions: Sequence[tuple[float, Decision]], end: float) -> tuple[ChartAnnotation, ...]:
    together: dict[int, list[tuple[float, Decision]]] = {}
    for at, decision in decisions:
        together.setdefault(min(MARKS - 1, int(at * MARKS / end)), []).append((at, decision))
    marks = []
    for each in together.values():
        lines = [decisions_of(at, decision) for at, decision in each[:MAX_DECISIONS]]
        if len(each) > MAX_DECISIONS:
            lines.append(f"and {len(each) - MAX_DECISIONS} more until {clock(each[-1][0])}")
        marks.append(ChartAnnotation(each[0][0], "\n".join(lines)))
    return tuple(marks)


def decisions_of(at: float, decision: Decision) -> str:
    """One decision as text: the change, its reason, and the rules that changed the count."""
    before, after = f"{decision.was_mode} x {decision.was_count}", f"{decision.mode} x {decision.count}"
    lines = [f"{clock(at)} {before} → {after}: {decision.reason}"]
    lines += [
        f"  {each.rule.value}: {each.was} → {each.now}, {each.why}" for each in decision.applied_guardrails
    ]
    return "\n".join(lines)


def clock(at: float) -> str:
    """An instant of a run as h:mm:ss."""
    minutes, seconds = divmod(math.floor(at), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
