"""The history of decisions in memory: an hour at full detail, a day by the minute, and the last changes.

Each decision is one row of numbers, of the columns in :data:`COLUMNS`. It is bounded by model: 3,600 rows of
the last hour, 1,440 of the last day, 500 changes; 1 MB at most.
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from policy.scaling.decision_types import Decision, Situation
from policy.scaling.policies.registry import NAMES
from serve.autoscaler.decision_journal import DecisionJournal, DecisionRound

DETAIL_S = 3600.0
DAY_S = 86_400.0
# Decisions that are closer than this replace each other in the detail.
LEAST_S = 1.0
COARSE_S = 60.0
MAX_CHANGES = 500
# Rows over the bound before the oldest are dropped: moving an array for each row would be slow.
SLACK = 60


class MergeRule(Enum):
    """How the rows of an interval become one."""

    LAST = "last"
    MEAN = "mean"
    MAX = "max"


# Rates are per second, latencies in seconds, shares 0..1. Replicas are of the desired layer, but for the
# ``leaving`` ones of others. The capacity is that within the SLO. A policy's column is the count it proposed.
COLUMNS: dict[str, MergeRule] = {
    "target": MergeRule.LAST,
    "ready": MergeRule.LAST,
    "starting": MergeRule.LAST,
    "draining": MergeRule.LAST,
    "leaving": MergeRule.LAST,
    "gpus": MergeRule.LAST,
    "arrivals_per_s": MergeRule.MEAN,
    "refused_per_s": MergeRule.MEAN,
    "forecast_per_s": MergeRule.MEAN,
    "capacity_per_s": MergeRule.MEAN,
    "concurrency": MergeRule.MEAN,
    "queued": MergeRule.MAX,
    "oldest_s": MergeRule.MAX,
    "ttft_p50_s": MergeRule.MEAN,
    "ttft_p95_s": MergeRule.MEAN,
    "itl_p50_s": MergeRule.MEAN,
    "itl_p95_s": MergeRule.MEAN,
    "met": MergeRule.MEAN,
    "kv_used": MergeRule.MEAN,
    "watts": MergeRule.MEAN,
    "proposed": MergeRule.LAST,
    "shadow": MergeRule.LAST,
    **dict.fromkeys(NAMES, MergeRule.LAST),
    "mode": MergeRule.LAST,
}
_MERGES = tuple(COLUMNS.values())
_WIDTH = len(COLUMNS)
_MODE = _WIDTH - 1

Row = tuple[float, ...]


class ScalingChange(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that changed count or mode; ``dry_run``: it was only logged."""

    at: float
    mode: str
    count: int
    was_mode: str
    was_count: int
    reason: str
    dry_run: bool = False


class ModelHistory(msgspec.Struct, frozen=True, kw_only=True):
    """One model's rows as ``columns`` of equal length, oldest first; ``None`` where nothing was measured.

    ``at`` are Unix seconds, ``mode`` the names of the modes. With ``step_s`` above 0, each row is the merge
    of that many seconds.
    """

    model: str
    step_s: float
    at: list[float]
    mode: list[str]
    columns: dict[str, list[float | None]]
    changes: list[ScalingChange]


class _Point(NamedTuple):
    """One decision: its ``numbers`` are all columns but the mode."""

    model: str
    at: float
    mode: str
    numbers: Row
    change: ScalingChange | None


class _Rows:
    """Rows in order of time, of the last ``span_s`` seconds."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self.at = array("d")
        self.values = array("f")

    def append(self, at: float, row: Sequence[float]) -> None:
        self.at.append(at)
        self.values.extend(row)
        old = bisect_left(self.at, at - self._span_s)
        if old > SLACK:
            del self.at[:old]
            del self.values[: old * _WIDTH]

    def copy(self) -> _Rows:
        copied = _Rows(self._span_s)
        copied.at, copied.values = self.at[:], self.values[:]
        return copied

    def pop(self) -> None:
        self.at.pop()
        del self.values[-_WIDTH:]

    def since(self, since: float) -> Iterator[tuple[float, Row]]:
        for i in range(bisect_left(self.at, since), len(self.at)):
            yield self.at[i], tuple(self.values[i * _WIDTH : (i + 1) * _WIDTH])


class _Model:
    """The history of one model. ``modes`` are the names that the last column numbers."""

    def __init__(self) -> None:
        self.modes: list[str] = []
        self.detail = _Rows(DETAIL_S)
        self.day = _Rows(DAY_S)
        self.minute: list[Row] = []
        self.changes: deque[ScalingChange] = deque(maxlen=MAX_CHANGES)

    def add(self, point: _Point) -> None:
        """Add a decision; one that is older than the last one, as by a clock that was set, is left out."""
        at, detail = point.at, self.detail
        if detail.at and at < detail.at[-1]:
            return
        if point.change is not None:
            self.changes.append(point.change)
        if point.mode not in self.modes:
            self.modes.append(point.mode)
        row = (*point.numbers, self.modes.index(point.mode))
        if detail.at and at // COARSE_S != detail.at[-1] // COARSE_S:
            self.day.append(detail.at[-1] // COARSE_S * COARSE_S, merged(self.minute))
            self.minute = []
        elif detail.at and at - detail.at[-1] < LEAST_S:
            detail.pop()
            self.minute.pop()
        detail.append(at, row)
        self.minute.append(row)

    def copy(self) -> _Model:
        """A copy of the rows and changes."""
        copied = _Model()
        copied.modes, copied.changes = self.modes[:], self.changes.copy()
        copied.detail, copied.day = self.detail.copy(), self.day.copy()
        return copied

    def rows(self, since: float, until: float) -> list[tuple[float, Row]]:
        """Minutes up to the hour of detail, then every decision."""
        began = self.detail.at[0] if self.detail.at else math.inf
        minutes = [(at, row) for at, row in self.day.since(since) if at + COARSE_S <= began]
        return [(at, row) for at, row in (*minutes, *self.detail.since(since)) if at <= until]


class DecisionHistory:
    """The histories of all models. It is written by one thread, and read by any."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._lock = threading.Lock()

    def add(self, situation: Situation, decision: Decision) -> None:
        """Add one decision."""
        self._add(_point(situation, decision))

    def _add(self, point: _Point) -> None:
        with self._lock:
            self._models.setdefault(point.model, _Model()).add(point)

    def forget(self, model: str) -> None:
        """Forget a model that was removed."""
        with self._lock:
            self._models.pop(model, None)

    def restore(self, journal: DecisionJournal, now: float) -> None:
        """Add what is on disk of the last day; before the first :meth:`add`. Not for an event loop.

        Rounds that are later than one written after them are of a clock that was set back since. They would
        keep out all that follows.
        """
        points: list[_Point] = []
        latest = now
        for line in journal.lines():
            if line.at < now - DAY_S:
                break
            if isinstance(line, DecisionRound) and line.at <= latest:
                latest = line.at
                points += [_point(line.situations[name], made) for name, made in line.decisions.items()]
        for point in reversed(points):
            self._add(point)

    def read(self, model: str, since: float, until: float = math.inf, step_s: float = 0.0) -> ModelHistory:
        """What is known of ``model`` from ``since`` to ``until``. Takes up to 0.1 s."""
        with self._lock:
            known = self._models.get(model, _Model()).copy()
        rows = known.rows(since, until)
        if step_s > 0:
            rows = _stepped(rows, step_s)
        columns = {name: [_number(row[i]) for _, row in rows] for i, name in enumerate(COLUMNS) if i != _MODE}
        return ModelHistory(
            model=model,
            step_s=step_s,
            at=[round(at, 3) for at, _ in rows],
            mode=[known.modes[int(row[_MODE])] for _, row in rows],
            columns=columns,
            changes=[change for change in known.changes if since <= change.at <= until],
        )

    def names(self) -> list[str]:
        """The models of which something is known."""
        return sorted(self._models)


def merged(rows: Sequence[Row]) -> Row:
    """One row for several, oldest first, column by column."""
    return tuple(
        _merge(merge, values) for merge, values in zip(_MERGES, zip(*rows, strict=True), strict=True)
    )


def _merge(merge: MergeRule, values: Sequence[float]) -> float:
    if merge is MergeRule.LAST:
        return values[-1]
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    return max(known) if merge is MergeRule.MAX else sum(known) / len(known)


def _stepped(rows: Sequence[tuple[float, Row]], step_s: float) -> list[tuple[float, Row]]:
    """A row for each interval of ``step_s`` seconds that has one, at its beginning."""
    groups: dict[float, list[Row]] = {}
    for at, row in rows:
        groups.setdefault(at // step_s * step_s, []).append(row)
    return [(at, merged(group)) for at, group in groups.items()]


def _number(value: float) -> float | None:
    # A 32-bit float holds six decimal digits.
    return None if math.isnan(value) else float(f"{value:.6g}")


def _point(situation: Situation, decision: Decision) -> _Point:
    change = msgspec.convert(decision, ScalingChange, from_attributes=True) if decision.changes else None
    return _Point(decision.model, decision.at, decision.mode, _numbers(situation, decision), change)


def _numbers(situation: Situation, decision: Decision) -> Row:
    """The numbers of one decision, in the order of :data:`COLUMNS`."""
    supply, signals, demand = situation.supply, situation.signals, situation.signals.demand
    gpus = {option.mode: option.gpus for option in situation.mode_options}
    held = supply.serving + len(supply.starting_s) + supply.draining
    samples = signals.replicas
    watts = [sample.watts for sample in samples if sample.watts is not None]
    ttft, itl = (demand.ttft, demand.itl) if demand is not None else (None, None)
    forecast, shadow = decision.proposal.forecast, decision.shadow
    return (
        decision.count,
        supply.serving,
        len(supply.starting_s),
        supply.draining,
        sum(situation.leaving.values()),
        held * gpus.get(situation.mode, 0)
        + sum(count * gpus.get(name, 0) for name, count in situation.leaving.items()),
        demand.arrivals.last_6_s if demand else math.nan,
        demand.refused.last_6_s if demand else math.nan,
        math.nan if forecast is None else forecast,
        decision.capability.mu * supply.serving if supply.serving else math.nan,
        demand.concurrency.last_6_s if demand else math.nan,
        demand.queued if demand else math.nan,
        demand.oldest_s if demand else math.nan,
        ttft.p50 if ttft else math.nan,
        ttft.p95 if ttft else math.nan,
        itl.p50 if itl else math.nan,
        itl.p95 if itl else math.nan,
        demand.met.both if demand and (ttft or itl) else math.nan,
        sum(sample.kv_used for sample in samples) / len(samples) if samples else math.nan,
        sum(watts) if watts else math.nan,
        decision.proposal.count,
        math.nan if shadow is None else shadow.count,
        *(decision.others.get(name, math.nan) for name in NAMES),
    )
