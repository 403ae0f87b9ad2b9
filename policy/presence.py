"""What replicas tell of themselves with their beats, as figures that decisions read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from policy.reports import EngineReport, PowerReport, StepSample
from policy.signals import ReplicaFigures
from policy.types import Beat, Replica, ReplicaState

# Rates are means over so long, of marks that are at least so far apart.
RATE_S = 6.0
APART_S = 0.5
# Steps that say how slow a replica is at present, and how many of them are kept.
STEPS_S = 60.0
MOST_STEPS = 512
# One that is silent for so long is gone, whether or not it said so.
SILENT_S = 60.0

Slowness = Callable[[Replica, Sequence[StepSample]], float]


def as_it_should_be(replica: Replica, steps: Sequence[StepSample]) -> float:
    """Every replica is as quick as its shape's model."""
    return 1.0


class _Heard:
    """One life of a replica's engine: its last beat, and what it told before."""

    __slots__ = ("at", "engine", "marks", "power", "replica", "steps")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.at = 0.0
        self.engine = EngineReport()
        self.power: PowerReport | None = None
        # When, the tokens scheduled until then, and the requests preempted.
        self.marks: deque[tuple[float, int, int]] = deque()
        self.steps: deque[tuple[float, StepSample]] = deque(maxlen=MOST_STEPS)

    def take(self, beat: Beat, at: float) -> None:
        self.replica, self.at = beat.replica, at
        if beat.engine is not None:
            self.engine = beat.engine
            self.steps.extend((at, step) for step in beat.engine.steps)
        if beat.power is not None:
            self.power = beat.power
        marks = self.marks
        if len(marks) > 1 and at - marks[-2][0] < APART_S:
            marks.pop()
        marks.append((at, beat.replica.load.tokens, self.engine.preempted))
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


class Presence:
    """The replicas that beat.

    ``slowness`` says of the steps of a replica's last minute how long they took beside what they should have.
    """

    def __init__(self, slowness: Slowness = as_it_should_be) -> None:
        self.slowness = slowness
        self._replicas: dict[str, _Heard] = {}

    def take(self, beat: Beat, at: float) -> None:
        """A replica tells how it is."""
        replica = beat.replica
        if replica.state is ReplicaState.STOPPED:
            self._replicas.pop(replica.id, None)
            return
        heard = self._replicas.get(replica.id)
        if heard is None:
            self._replicas = {n: other for n, other in self._replicas.items() if other.at >= at - SILENT_S}
        if heard is None or _engine(heard.replica) != _engine(replica):
            heard = self._replicas[replica.id] = _Heard(replica)
        heard.take(beat, at)

    def figures(self, model: str, at: float) -> tuple[ReplicaFigures, ...]:
        """Those of the replicas of ``model`` that serve."""
        found = sorted(self._replicas.items())
        return tuple(
            self._figures(heard, at)
            for _, heard in found
            if heard.replica.model == model
            and heard.replica.state is ReplicaState.READY
            and heard.at >= at - SILENT_S
        )

    def _figures(self, heard: _Heard, at: float) -> ReplicaFigures:
        load, engine, power = heard.replica.load, heard.engine, heard.power
        tokens_per_s, preempted_per_s = heard.rates()
        steps = [step for told_at, step in heard.steps if told_at > at - STEPS_S]
        return ReplicaFigures(
            id=heard.replica.id,
            age_s=at - heard.at,
            running=load.running,
            waiting=load.waiting,
            kv_used=load.kv_used,
            tokens_per_s=tokens_per_s,
            deferred=engine.deferred,
            preempted_per_s=preempted_per_s,
            slowness=self.slowness(heard.replica, steps) if steps else 1.0,
            watts=None if power is None else power.watts,
            celsius=None if power is None else power.celsius,
            throttled="" if power is None else power.throttled,
        )


def _engine(replica: Replica) -> tuple[int, int]:
    """What is another with each start of its engine."""
    return replica.incarnation, replica.pid
