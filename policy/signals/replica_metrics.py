"""What replicas tell of themselves with their beats, as figures that decisions read."""

from __future__ import annotations

from collections import deque

from policy.signals.types import ReplicaSample
from policy.types import Replica, ReplicaPhase
from policy.wire.heartbeat import Heartbeat
from policy.wire.reports import EngineReport, PowerReport, is_of_card

# Rates are means over so long, of marks that are at least so far apart.
RATE_S = 6.0
APART_S = 0.5
# One that is silent for so long is gone, whether or not it said so.
SILENT_S = 60.0


class _Heard:
    """One life of a replica's engine: its last beat, and what it told before."""

    __slots__ = ("at", "engine", "marks", "power", "replica")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.at = 0.0
        self.engine: EngineReport | None = None
        self.power: PowerReport | None = None
        # When, the tokens scheduled until then, and the requests preempted.
        self.marks: deque[tuple[float, int, int]] = deque()

    def take(self, beat: Heartbeat, at: float) -> None:
        self.replica, self.at = beat.replica, at
        if beat.engine is not None:
            if self.engine is None:  # what it counted before it was heard came not just now
                self.marks.clear()
            self.engine = beat.engine
        if beat.power is not None:
            self.power = beat.power
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
    """The replicas that beat; how slow they are is for :mod:`policy.engine.calibration` to say."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Heard] = {}

    def take(self, beat: Heartbeat, at: float) -> None:
        """A replica tells how it is."""
        replica = beat.replica
        if replica.state is ReplicaPhase.STOPPED:
            self._replicas.pop(replica.id, None)
            return
        heard = self._replicas.get(replica.id)
        if heard is None:
            self._replicas = {n: other for n, other in self._replicas.items() if other.at >= at - SILENT_S}
        if heard is None or _engine(heard.replica) != _engine(replica):
            heard = self._replicas[replica.id] = _Heard(replica)
        heard.take(beat, at)

    def figures(self, model: str, at: float) -> tuple[ReplicaSample, ...]:
        """Those of the replicas of ``model`` that serve."""
        found = sorted(self._replicas.items())
        return tuple(
            self._figures(heard, at)
            for _, heard in found
            if heard.replica.model == model
            and heard.replica.state is ReplicaPhase.READY
            and heard.at >= at - SILENT_S
        )

    def _figures(self, heard: _Heard, at: float) -> ReplicaSample:
        load, engine, power = heard.replica.load, heard.engine, heard.power
        tokens_per_s, preempted_per_s = heard.rates()
        return ReplicaSample(
            id=heard.replica.id,
            age_s=at - heard.at,
            running=load.running,
            waiting=load.waiting,
            kv_used=load.kv_used,
            tokens_per_s=tokens_per_s,
            deferred=0 if engine is None else engine.deferred,
            preempted_per_s=preempted_per_s,
            watts=None if power is None else power.watts,
            celsius=None if power is None else power.celsius,
            throttled="" if power is None else _trouble(power),
        )


def _trouble(power: PowerReport) -> str:
    """What its cards suffer from: an error of one goes before what slows them."""
    failed = f"XID {power.xid} on {power.card or 'a card'}" if is_of_card(power.xid) else ""
    return ", ".join(part for part in (failed, power.throttled) if part)


def _engine(replica: Replica) -> tuple[int, int]:
    """What is another with each start of its engine."""
    return replica.incarnation, replica.pid
