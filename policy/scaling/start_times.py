"""How long starts take: from when a replica was asked for until it was ready, by the path that it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from policy.scaling.rollout import Layer, LayerKey
from policy.scaling.view import Supply
from policy.types import Replica, ReplicaPhase, StartPath

KEPT = 9
# One that is overdue is expected to take such a part of what it took already.
OVERDUE = 0.1


class StartTime(msgspec.Struct, frozen=True, kw_only=True):
    """The last starts of one shape by one path, in seconds, oldest first."""

    model: str
    shape: str
    path: StartPath
    seconds: tuple[float, ...]


class StartTimes:
    """Measured starts of each shape, and when those began that go on. Every call is given the instant."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str, StartPath], deque[float]] = {}
        self._asked: dict[LayerKey, deque[float]] = {}
        self._began: dict[str, float] = {}
        self._ready: dict[str, int] = {}

    def asked(self, key: LayerKey, more: int, at: float) -> None:
        """The actuator was told to have so many replicas ``more``, or fewer."""
        asked = self._asked.setdefault(key, deque())
        asked.extend([at] * more)
        for _ in range(min(-more, len(asked))):
            asked.pop()

    def note(self, replica: Replica, at: float) -> bool:
        """Take a heartbeat; returns whether it says that an engine has just become ready."""
        if replica.state is ReplicaPhase.STARTING and replica.id not in self._began:
            asked = self._asked.get(_key(replica))
            self._began[replica.id] = asked.popleft() if asked else at
        elif replica.state in (ReplicaPhase.STOPPED, ReplicaPhase.ASLEEP):
            self._began.pop(replica.id, None)
            self._ready.pop(replica.id, None)
        asleep = (replica.model, replica.shape, StartPath.SLEEPING)
        if replica.wake_s is not None and asleep not in self._taken:
            # Found out when it was made, before anybody waited for it.
            self._taken[asleep] = deque([replica.wake_s], maxlen=KEPT)
        if replica.state is not ReplicaPhase.READY or self._ready.get(replica.id) == replica.incarnation:
            return False
        self._ready[replica.id] = replica.incarnation
        began = self._began.pop(replica.id, None)
        if replica.start_s is not None:
            # An engine that was restarted in place says nothing of what its host took to come.
            whole_s = at - began if began is not None and not replica.incarnation else 0.0
            path = (replica.model, replica.shape, replica.start_path)
            self._taken.setdefault(path, deque(maxlen=KEPT)).append(max(replica.start_s, whole_s))
        return True

    def lead_s(self, model: str, shape: str, assumed_s: float, *, sleeps: bool = False) -> float:
        """How long the next start takes: the median of the quickest path that is known to be at hand.

        Weights that were on a node once are cached there, so a first start says nothing of the next where
        a later one was measured; what ``sleeps`` is only woken. A shape that never ran takes ``assumed_s``.
        """
        for path in (StartPath.SLEEPING, StartPath.CACHED, StartPath.COLD):
            if path is StartPath.SLEEPING and not sleeps:
                continue
            if taken := self._taken.get((model, shape, path)):
                return sorted(taken)[len(taken) // 2]
        return assumed_s

    def remaining_s(self, replicas: Iterable[Replica], lead_s: float, at: float) -> tuple[float, ...]:
        """How long until each of ``replicas`` that start will be ready, in seconds."""
        elapsed = (at - self._began.get(replica.id, at) for replica in replicas)
        return tuple(max(lead_s - since_s, OVERDUE * since_s, 0.0) for since_s in elapsed)

    def supply(self, layer: Layer, starting: Iterable[Replica], lead_s: float, at: float) -> Supply:
        """A layer as a policy sees it, of whose replicas ``starting`` have sent a heartbeat.

        Replicas that were asked for and have not sent one yet are still to start.
        """
        unheard = max(0, layer.wanted - layer.starting - layer.ready)
        return Supply(
            wanted=layer.wanted,
            serving=layer.ready,
            starting_s=(*self.remaining_s(starting, lead_s, at), *[lead_s] * unheard),
            draining=layer.draining,
            failures=layer.failures,
        )

    def saved(self) -> tuple[StartTime, ...]:
        """What was measured, to be kept."""
        return tuple(
            StartTime(model=model, shape=shape, path=path, seconds=tuple(taken))
            for (model, shape, path), taken in self._taken.items()
        )

    def restore(self, saved: Iterable[StartTime]) -> None:
        """Take up what a predecessor measured."""
        for taken in saved:
            key = (taken.model, taken.shape, taken.path)
            self._taken[key] = deque(taken.seconds, maxlen=KEPT)


def _key(replica: Replica) -> LayerKey:
    return LayerKey(replica.model, replica.shape, replica.generation)
