"""Start-up times of replicas, from the request to ready, by start path."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median_high

import msgspec

from policy.scaling.reconcile_steps import Layer, LayerKey
from policy.scaling.view import Supply
from policy.types import Replica, ReplicaPhase, StartPath

KEPT = 9
# An overdue start is expected to take this fraction of its elapsed time longer.
OVERDUE = 0.1


class StartTime(msgspec.Struct, frozen=True, kw_only=True):
    """The last starts of one shape by one path, in seconds, oldest first."""

    model: str
    shape: str
    path: StartPath
    seconds: tuple[float, ...]


class StartTimes:
    """The measured starts of each shape, and the beginnings of current ones. Instants are arguments."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str, StartPath], deque[float]] = {}
        self._requested: dict[LayerKey, deque[float]] = {}
        self._began: dict[str, float] = {}
        self._ready: dict[str, int] = {}

    def requested(self, key: LayerKey, more: int, at: float, missing: int) -> None:
        """Note that ``more`` replicas (fewer if negative) were requested; ``missing`` are not seen yet."""
        requested = self._requested.setdefault(key, deque())
        requested.extend([at] * more)
        for _ in range(min(-more, len(requested))):
            requested.pop()
        # A replica that was ready at its first heartbeat took no instant: it would count for a later start.
        while len(requested) > max(missing, 0):
            requested.popleft()

    def note(self, replica: Replica, at: float) -> bool:
        """Take a heartbeat; returns whether an engine has just become ready."""
        if replica.state is ReplicaPhase.STARTING and replica.id not in self._began:
            requested = self._requested.get(LayerKey.of(replica))
            self._began[replica.id] = requested.popleft() if requested else at
        elif replica.state in (ReplicaPhase.STOPPED, ReplicaPhase.ASLEEP):
            self._began.pop(replica.id, None)
            self._ready.pop(replica.id, None)
        asleep = (replica.model, replica.shape, StartPath.SLEEPING)
        if replica.wake_s is not None and asleep not in self._measured:
            # Measured when the replica was created.
            self._measured[asleep] = deque([replica.wake_s], maxlen=KEPT)
        if replica.state is not ReplicaPhase.READY or self._ready.get(replica.id) == replica.incarnation:
            return False
        self._ready[replica.id] = replica.incarnation
        began = self._began.pop(replica.id, None)
        if replica.start_s is not None:
            # An engine restarted in place does not include the start of its host.
            whole_s = at - began if began is not None and not replica.incarnation else 0.0
            path = (replica.model, replica.shape, replica.start_path)
            self._measured.setdefault(path, deque(maxlen=KEPT)).append(max(replica.start_s, whole_s))
        return True

    def lead_s(self, model: str, shape: str, assumed_s: float, *, sleeps: bool = False) -> float:
        """The expected time of the next start in seconds: the median of the quickest path measured.

        A cold start counts only until a cached one was measured; a replica that ``sleeps`` is woken. A shape
        that never started takes ``assumed_s``.
        """
        for path in (StartPath.SLEEPING, StartPath.CACHED, StartPath.COLD):
            if path is StartPath.SLEEPING and not sleeps:
                continue
            if seconds := self._measured.get((model, shape, path)):
                return median_high(seconds)
        return assumed_s

    def remaining_s(self, replicas: Iterable[Replica], lead_s: float, at: float) -> tuple[float, ...]:
        """The seconds until each of the starting ``replicas`` is ready."""
        elapsed = (at - self._began.get(replica.id, at) for replica in replicas)
        return tuple(max(lead_s - since_s, OVERDUE * since_s, 0.0) for since_s in elapsed)

    def supply(self, layer: Layer, starting: Iterable[Replica], lead_s: float, at: float) -> Supply:
        """The supply of a layer, whose ``starting`` replicas have sent a heartbeat; missing ones follow."""
        silent = max(0, layer.wanted - layer.starting - layer.ready)
        return Supply(
            wanted=layer.wanted,
            serving=layer.ready,
            starting_s=(*self.remaining_s(starting, lead_s, at), *[lead_s] * silent),
            draining=layer.draining,
            failures=layer.failures,
        )

    def saved(self) -> tuple[StartTime, ...]:
        """The measurements, for the state file."""
        return tuple(
            StartTime(model=model, shape=shape, path=path, seconds=tuple(seconds))
            for (model, shape, path), seconds in self._measured.items()
        )

    def restore(self, saved: Iterable[StartTime]) -> None:
        """Take over saved measurements."""
        for start in saved:
            key = (start.model, start.shape, start.path)
            self._measured[key] = deque(start.seconds, maxlen=KEPT)
