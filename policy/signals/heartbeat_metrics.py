"""Metrics of replicas from their heartbeats, as decisions read them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from policy.signals.types import ReplicaSample
from policy.types import Replica, ReplicaPhase
from policy.wire.controller_reports import EngineReport, GpuReport, is_of_card
from policy.wire.heartbeat import Heartbeat

# Rates are means over RATE_S, of samples at least APART_S apart.
RATE_S = 6.0
APART_S = 0.5
# A replica without a heartbeat for this long has ended.
SILENT_S = 60.0


@dataclass(slots=True)
class _Reports:
    """The reports of one engine process: the last heartbeat, and earlier samples.

    ``marks`` are samples: instant, total tokens scheduled, total requests preempted.
    """

    replica: Replica
    at: float = 0.0
    engine: EngineReport | None = None
    gpus: GpuReport | None = None
    marks: deque[tuple[float, int, int]] = field(default_factory=deque)

    def take(self, beat: Heartbeat, at: float) -> None:
        self.replica, self.at = beat.replica, at
        if beat.engine is not None:
            if self.engine is None:  # earlier counts are not of this moment
                self.marks.clear()
            self.engine = beat.engine
        if beat.gpus is not None:
            self.gpus = beat.gpus
        marks = self.marks
        if len(marks) > 1 and at - marks[-2][0] < APART_S:
            marks.pop()
        preempted = 0 if self.engine is None else self.engine.preempted
        marks.append((at, beat.replica.load.tokens, preempted))
        while len(marks) > 2 and marks[1][0] <= at - RATE_S:
            marks.popleft()

    def rates(self) -> tuple[float, float]:
        """Tokens and preemptions per second."""
        began, tokens, preempted = self.marks[0]
        ended, tokens_now, preempted_now = self.marks[-1]
        seconds = ended - began
        if seconds <= 0.0:
            return 0.0, 0.0
        return max(0, tokens_now - tokens) / seconds, max(0, preempted_now - preempted) / seconds


class ReplicaMetrics:
    """The replicas that send heartbeats. :mod:`policy.engine.online_calibration` measures their slowness."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Reports] = {}

    def take(self, beat: Heartbeat, at: float) -> None:
        """Take the heartbeat of a replica."""
        replica = beat.replica
        if replica.state is ReplicaPhase.STOPPED:
            self._replicas.pop(replica.id, None)
            return
        reports = self._replicas.get(replica.id)
        if reports is None:
            self._replicas = {n: other for n, other in self._replicas.items() if other.at >= at - SILENT_S}
        if reports is None or _engine(reports.replica) != _engine(replica):
            reports = self._replicas[replica.id] = _Reports(replica)
        reports.take(beat, at)

    def gpus(self, at: float) -> dict[str, GpuReport]:
        """The last report on the GPUs of each replica that has some, by its id."""
        return {
            name: reports.gpus
            for name, reports in sorted(self._replicas.items())
            if reports.gpus is not None and reports.at >= at - SILENT_S
        }

    def engines(self) -> dict[str, EngineReport]:
        """The last reports of engines, by replica."""
        found = self._replicas.items()
        return {name: reports.engine for name, reports in found if reports.engine is not None}

    def figures(self, model: str, at: float) -> tuple[ReplicaSample, ...]:
        """The metrics of the ready replicas of ``model``."""
        found = sorted(self._replicas.items())
        return tuple(
            self._figures(reports, at)
            for _, reports in found
            if reports.replica.model == model
            and reports.replica.state is ReplicaPhase.READY
            and reports.at >= at - SILENT_S
        )

    def _figures(self, reports: _Reports, at: float) -> ReplicaSample:
        load, engine, gpus = reports.replica.load, reports.engine, reports.gpus
        tokens_per_s, preempted_per_s = reports.rates()
        throttled = "" if gpus is None else gpus.throttled
        if gpus is not None and is_of_card(gpus.xid):
            failed = f"XID {gpus.xid} on {gpus.card or 'a card'}"
            throttled = f"{failed}, {throttled}" if throttled else failed
        return ReplicaSample(
            id=reports.replica.id,
            age_s=at - reports.at,
            running=load.running,
            waiting=load.waiting,
            kv_used=load.kv_used,
            tokens_per_s=tokens_per_s,
            deferred=0 if engine is None else engine.deferred,
            preempted_per_s=preempted_per_s,
            watts=None if gpus is None else gpus.watts,
            celsius=None if gpus is None else gpus.celsius,
            throttled=throttled,
        )


def _engine(replica: Replica) -> tuple[int, int]:
    """A key that changes with each start of its engine."""
    return replica.incarnation, replica.pid
