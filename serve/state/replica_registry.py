"""The replicas that exist, built from their heartbeats alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from policy.scaling.reconcile_steps import LayerKey
from policy.types import FleetSnapshot, Model, Replica, ReplicaPhase
from serve.state.versioned_watch import Revision

# Hosts send two heartbeats a second. A silent one is probed before it is removed, so that a busy machine
# does not empty the fleet.
SILENT_S = 1.2
GONE_S = 10.0
# The host of a replica that is silent for so long hangs and is replaced. A start does not count: hosts send
# heartbeats while they prepare weights, and while their engines start.
HUNG_S = 20.0


# Everything but the load and the loaded adapters, which change all the time.
_identity = attrgetter("state", "url", "incarnation", "reason", "failures", "pid")


@dataclass(slots=True)
class _Entry:
    replica: Replica
    seen: float


class ReplicaRegistry:
    """The replicas that send heartbeats, and the fleet snapshot made of them."""

    def __init__(self, epoch: float, term: int = 0) -> None:
        self._epoch = epoch
        self._term = term
        self.revision = Revision()
        self._entries: dict[str, _Entry] = {}
        # Replicas that were given up: their hosts may hang.
        self._gone: dict[str, _Entry] = {}
        self._models: tuple[Model, ...] = ()
        # Engines that were started again in place, by model.
        self.restarts: Counter[str] = Counter()

    def put(self, replica: Replica, now: float) -> bool:
        """Take a heartbeat; returns whether more than its load, and what it has loaded, changed."""
        old = self._entries.get(replica.id)
        self._gone.pop(replica.id, None)
        if replica.state is ReplicaPhase.STOPPED:
            return self._remove(replica.id)
        self._entries[replica.id] = _Entry(replica, now)
        if old is not None and replica.incarnation > old.replica.incarnation:
            self.restarts[replica.model] += replica.incarnation - old.replica.incarnation
        if old is not None and _identity(old.replica) == _identity(replica):
            return False
        self.revision.bump()
        return True

    def ages(self, now: float) -> dict[str, float]:
        """The seconds since the last heartbeat of each replica."""
        return {name: now - entry.seen for name, entry in self._entries.items()}

    def silent(self, now: float) -> list[Replica]:
        """Replicas whose heartbeat is overdue."""
        return [e.replica for e in self._entries.values() if now - e.seen > SILENT_S]

    def give_up(self, replica: Replica, now: float, *, refused: bool) -> bool:
        """Drop a silent replica whose port refuses, or that was silent for too long."""
        entry = self._entries.get(replica.id)
        if entry is None or entry.replica is not replica:
            return False
        if refused or now - entry.seen > GONE_S:
            self._gone[replica.id] = entry
            return self._remove(replica.id)
        return False

    def take_hung(self, now: float) -> list[Replica]:
        """Replicas that were removed and have been silent for :data:`HUNG_S`: their hosts hang. Each once."""
        hung = {name: entry.replica for name, entry in self._gone.items() if now - entry.seen > HUNG_S}
        self._gone = {name: entry for name, entry in self._gone.items() if name not in hung}
        return list(hung.values())

    def not_heard_until(self, now: float) -> None:
        """Nothing was heard until ``now`` because this process did not run: no silence counts."""
        for entry in (*self._entries.values(), *self._gone.values()):
            entry.seen = now

    def set_models(self, models: Iterable[Model]) -> None:
        """Replace the descriptions of the models."""
        new = tuple(models)
        if new != self._models:
            self._models = new
            self.revision.bump()

    def of(self, key: LayerKey) -> list[Replica]:
        """The replicas of one layer."""
        return [e.replica for e in self._entries.values() if LayerKey.of(e.replica) == key]

    def keys(self, model: str) -> set[LayerKey]:
        """The layers of which ``model`` has replicas."""
        return {LayerKey.of(e.replica) for e in self._entries.values() if e.replica.model == model}

    def fleet(self, now: float) -> FleetSnapshot:
        """The snapshot of this instant, loads included."""
        replicas = tuple(sorted((e.replica for e in self._entries.values()), key=lambda r: r.id))
        return FleetSnapshot(
            epoch=self._epoch, version=self.revision.number, at=now, models=self._models, replicas=replicas,
            term=self._term,
        )  # fmt: skip

    def _remove(self, replica: str) -> bool:
        if self._entries.pop(replica, None) is None:
            return False
        self.revision.bump()
        return True
