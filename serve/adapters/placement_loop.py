"""Adapter placement: from the demand, a plan for each model every few seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from policy.adapter_placement.plan import PLAN_PERIOD_S, plan
from policy.adapter_placement.types import EMPTY, PlacementHost, PlacementPlan, VersionDemand
from policy.hashing import hash_name
from policy.types import Replica, ReplicaPhase
from policy.wire.adapter_catalog import Alias, served_name
from policy.wire.heartbeat import AdapterRef, HeartbeatResponse
from serve.adapters.adapter_demand import AdapterDemandTracker
from serve.async_waiting import run_in_thread

# Assumed seconds of a load before one was measured.
LOAD_S = 0.25


@dataclass(eq=False)
class AdapterPlacementPlans:
    """The current plan of each model; ``slots`` gives the number of adapter slots of a replica."""

    demand: AdapterDemandTracker
    slots: Callable[[Replica], int]
    _plans: dict[str, PlacementPlan] = field(default_factory=dict, init=False)
    # The planned adapters of each replica; ``None`` while the demand is unknown.
    _holds: dict[str, tuple[AdapterRef, ...] | None] = field(default_factory=dict, init=False)
    _planned_at: dict[str, float] = field(default_factory=dict, init=False)

    def due(self, model: str, at: float) -> bool:
        """Whether a new plan of ``model`` is due."""
        return at - self._planned_at.get(model, float("-inf")) >= PLAN_PERIOD_S

    def make_due(self, model: str) -> None:
        """Make a new plan of ``model`` due."""
        self._planned_at.pop(model, None)

    async def plan(
        self, model: str, replicas: Iterable[Replica], aliases: Iterable[Alias], at: float
    ) -> None:
        """Make a plan for the ``replicas`` and ``aliases`` of ``model``; one call at a time."""
        self._planned_at[model] = at
        hosts = [self._host(replica, at) for replica in replicas if _takes(replica)]
        known = {
            served_name(alias.name, version.digest): AdapterRef(name=alias.name, digest=version.digest)
            for alias in aliases
            for version in alias.versions
        }
        demands = [demand for alias in aliases for demand in self._demands(alias, at)]
        last = self._plans.get(model, EMPTY)
        if not last.homes and not any(demand.expected or demand.waiting for demand in demands):
            # After a restart of the controller the replicas keep what they have until there is demand.
            for host in hosts:
                self._holds.setdefault(host.id, None)
            return
        # With thousands of slots a plan takes a second: heartbeats and the lease must not wait for it.
        made = await run_in_thread(lambda: plan(hosts, demands, last, at), "adapters-plan")
        self._plans[model] = made
        for host in hosts:
            held = made.hold.get(host.id, ())
            self._holds[host.id] = tuple(known[name] for name in held if name in known)

    def keep(self, models: Sequence[str], replicas: Sequence[str]) -> None:
        """Forget all other models and replicas."""
        self._plans = {model: plan for model, plan in self._plans.items() if model in models}
        self._planned_at = {model: at for model, at in self._planned_at.items() if model in models}
        kept = set(replicas)
        self._holds = {replica: hold for replica, hold in self._holds.items() if replica in kept}

    def lacks(self, replica: Replica) -> bool:
        """Whether this replica belongs in the plan but joined after it was made."""
        return _takes(replica) and replica.id not in self._holds

    def orders(self, replica: str) -> HeartbeatResponse:
        """The orders for a replica."""
        return HeartbeatResponse(hold=self._holds.get(replica))

    @property
    def holds(self) -> Mapping[str, tuple[AdapterRef, ...]]:
        """The adapters planned for each replica."""
        return {replica: hold or () for replica, hold in self._holds.items()}

    def why(self, model: str, served: str) -> str:
        """The reason for the placement of a version."""
        return self._plans.get(model, EMPTY).explain(served)

    def _host(self, replica: Replica, at: float) -> PlacementHost:
        refused = self.demand.refusing(replica.id, at)
        return PlacementHost(
            id=replica.id,
            key=hash_name(replica.id),
            slots=self.slots(replica),
            seats=float(max(1, replica.load.bound)),
            resident=frozenset(replica.adapters),
            refused=frozenset(served_name(wanted.name, wanted.digest) for wanted in refused),
        )

    def _demands(self, alias: Alias, at: float) -> Iterable[VersionDemand]:
        """The demand for each version. The forecast follows the current split of the name."""
        usages = {
            version.number: self.demand.usage(
                alias.model, AdapterRef(name=alias.name, digest=version.digest), at
            )
            for version in alias.versions
        }
        whole = sum(max(usage.rate, usage.rising) for usage in usages.values())
        if not whole and not any(usage.waiting for usage in usages.values()):
            return
        shares = alias.shares
        for version in alias.versions:
            usage = usages[version.number]
            served = served_name(alias.name, version.digest)
            yield VersionDemand(
                name=served,
                key=hash_name(served),
                rate=usage.rate,
                forecast=whole * shares.get(version.number, 0.0),
                load_s=LOAD_S if usage.load_s is None else usage.load_s,
                service_s=usage.service_s or 0.0,
                waiting=usage.waiting,
                rank=version.rank,
            )


def _takes(replica: Replica) -> bool:
    return replica.state in (ReplicaPhase.STARTING, ReplicaPhase.READY)
