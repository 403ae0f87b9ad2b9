"""The replicas that exist, built from their heartbeats alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from policy.scaling.reconcile_steps import LayerKey
from policy.types import FleetSnapshot, Model, Replica, ReplicaLoad, ReplicaPhase
from serve.actuator.interface import host_part
from serve.state.versioned_watch import Revision

# Hosts send two heartbeats a second. A silent one is probed before it is removed, so that a busy machine
# does not empty the fleet.
SILENT_S = 1.2
GONE_S = 10.0
# The host of a replica that is silent for so long hangs and is replaced. A start does not count: hosts send
# heartbeats while they prepare weights, and while their engines start.
HUNG_S = 20.0
# The same of a host that never sent one: it first imports its libraries, from a disk that may be slow.
UNHEARD_S = 120.0


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
        # Hosts that exist, of which nothing was heard since they were first seen.
        self._unheard: dict[str, _Entry] = {}
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

    def expect(self, hosts: Mapping[str, LayerKey], now: float) -> None:
        """All ``hosts`` that the actuator knows by their ids: of one that hangs nothing may ever be heard."""
        heard = self._heard_parts()
        self._unheard = {
            host: self._unheard.get(host) or _Entry(_unheard_replica(host, key), now)
            for host, key in hosts.items()
            if host_part(host) not in heard
        }

    def _heard_parts(self) -> set[str]:
        """The parts of the ids of all replicas that sent heartbeats."""
        return {host_part(name) for name in (*self._entries, *self._gone)}

    def take_hung(self, now: float) -> list[Replica]:
        """Replicas that were removed and have been silent for :data:`HUNG_S`: their hosts hang. Each once.

        Also hosts that are expected and were silent for :data:`UNHEARD_S`.
        """
        # They may have been heard since they were expected.
        heard = self._heard_parts() if self._unheard else set()
        unheard = [
            name
            for name, entry in self._unheard.items()
            if now - entry.seen > UNHEARD_S and host_part(name) not in heard
        ]
        found = [self._unheard.pop(name).replica for name in unheard]
        gone = [name for name, entry in self._gone.items() if now - entry.seen > HUNG_S]
        return [*(self._gone.pop(name).replica for name in gone), *found]

    def not_heard_until(self, now: float) -> None:
        """Nothing was heard until ``now`` because this process did not run: no silence counts."""
        for entry in (*self._entries.values(), *self._gone.values(), *self._unheard.values()):
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


def _unheard_replica(host: str, key: LayerKey) -> Replica:
    return Replica(
        id=host, model=key.model, shape=key.shape, generation=key.generation,
        state=ReplicaPhase.STARTING, load=ReplicaLoad(at=0.0),
    )  # fmt: skip
