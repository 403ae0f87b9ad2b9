"""The adapter part of the controller: which adapters exist, how they are used, and where they are placed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policy.config.deployment import Deployment
from policy.errors import TidegateError
from policy.types import Replica
from policy.wire.adapter_catalog import served_name
from policy.wire.heartbeat import AdapterRef, Heartbeat, HeartbeatResponse
from serve.adapters.adapter_demand import AdapterDemandTracker
from serve.adapters.adapter_registry import AdapterRegistry
from serve.adapters.base_model_check import BaseModelChecker
from serve.adapters.placement_loop import AdapterPlacementPlans
from serve.adapters.reconcile_declared import DeclaredAdapterReconciler
from serve.adapters.status import AdaptersStatus, AdapterState, AdapterStatus, AdapterStatusView
from serve.async_waiting import wait_at_most
from serve.state.reconcile_errors import ModelFailures
from serve.state.replica_registry import ReplicaRegistry
from store.state_dir import StateDir

if TYPE_CHECKING:
    from serve.adapters.adapter_store import AdapterStore  # imports the database, which takes long

log = logging.getLogger("tidegate.adapters")

STEP_S = 1.0
CLEAR_S = 60.0
# Names of adapters that metrics have as labels, of each model.
MAX_NAMES = 200


@dataclass(eq=False)
class AdapterController:
    """Composition root. ``slots`` gives the number of adapter slots of a replica."""

    open_store: Callable[[], AdapterStore]
    registry: ReplicaRegistry
    state: StateDir
    epoch: float
    term: int
    slots: Callable[[Replica], int]
    wall: Callable[[], float]
    monotonic: Callable[[], float]
    event: Callable[[str], None]
    failures: ModelFailures

    def __post_init__(self) -> None:
        self.changed = asyncio.Event()
        self.library = AdapterRegistry(self.open_store, self.epoch, self.event, term=self.term)
        self.declared = DeclaredAdapterReconciler(self.library, self.state, self.monotonic)
        self.bases = BaseModelChecker(self.library, self.state, self.event)
        self._demand = AdapterDemandTracker()
        self._placement = AdapterPlacementPlans(self._demand, self.slots)

    def declare(self, deployment: Deployment, *, applied: bool) -> None:
        """Set the deployment; if it was just ``applied``, its adapter sources are checked for changes."""
        self.library.declare(deployment)
        self.declared.declare(deployment, applied=applied)
        self.changed.set()

    def beat(self, beat: Heartbeat) -> HeartbeatResponse:
        """Record the adapter usage of a registered replica; the adapters that are planned for it."""
        self._demand.note(beat, self.monotonic())
        replica = beat.replica
        if replica.model in self.library.catalog.models and self._placement.lacks(replica):
            # A starting replica gets a plan by its next heartbeat: it can load adapters before traffic.
            self._placement.make_due(replica.model)
        return self._placement.orders(replica.id)

    async def place(self) -> None:
        """Make the placement plans that are due."""
        now = self.monotonic()
        due = [model for model in self.library.catalog.models if self._placement.due(model, now)]
        if due:
            replicas = [replica.id for replica in self._fleet()]
            self._demand.keep(replicas)
            self._placement.keep(self.library.catalog.models, replicas)
        for model in due:
            with self.failures.recorded(model, "adapter placement"):
                aliases = self.library.catalog.of(model)
                await self._placement.plan(model, self._replicas(model), aliases, now)

    def status(self) -> AdaptersStatus:
        """The status of all adapters."""
        now, wall = self.monotonic(), self.wall()
        troubles = self.declared.troubles
        notes = self.bases.notes() | self.library.fetching()
        notes |= {key: trouble.reason for key, trouble in troubles.items()}
        adapters: dict[tuple[str, str], AdapterStatus] = {}
        for model in self.library.catalog.models:
            view = AdapterStatusView(self._replicas(model), self._demand, self._placement, now, wall)
            for alias in self.library.catalog.of(model):
                key = (alias.model, alias.name)
                adapters[key] = view.of(alias, notes.get(key, ""))
        for model, name in notes.keys() - adapters.keys():
            key = (model, name)
            refused = key in troubles and troubles[key].refused
            state = AdapterState.FAILED if refused else AdapterState.FETCHING
            adapters[key] = AdapterStatus(model=model, name=name, state=state, note=notes[key])
        shown = tuple(adapters[key] for key in sorted(adapters))
        return AdaptersStatus(at=wall, models=self.library.catalog.models, adapters=shown)

    def metrics(self) -> Iterator[tuple[str, float, tuple[str, ...]]]:
        """Samples of adapters that replicas have loaded: the :data:`MAX_NAMES` most loaded of each model."""
        now, catalog = self.monotonic(), self.library.catalog
        for model in catalog.models:
            loaded = Counter(name for replica in self._replicas(model) for name in replica.adapters)
            aliases = catalog.of(model)
            yield "tidegate_adapters", len(aliases), (model,)
            known = {served_name(a.name, v.digest): (a.name, v.digest) for a in aliases for v in a.versions}
            names: dict[str, list[tuple[str, int]]] = {}
            for served, count in loaded.most_common():
                if served in known and (known[served][0] in names or len(names) < MAX_NAMES):
                    name, version = known[served]
                    names.setdefault(name, []).append((version, count))
            for name, versions in names.items():
                refs = [AdapterRef(name=name, digest=version) for version, _ in versions]
                usages = [self._demand.usage(model, ref, now) for ref in refs]
                labels = model, name
                yield "tidegate_adapter_replicas", sum(count for _, count in versions), labels
                yield "tidegate_adapter_loads", sum(usage.loads for usage in usages), labels
                rate = sum(usage.rate for usage in usages)
                if rate:
                    found = sum(usage.rate * (usage.hit_rate or 0.0) for usage in usages)
                    yield "tidegate_adapter_hit_ratio", found / rate, labels
                if load_s := [usage.load_s for usage in usages if usage.load_s is not None]:
                    yield "tidegate_adapter_load_seconds", max(load_s), labels

    async def run(self) -> None:
        """Reconcile declared adapters, check base models, and delete unused files, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reconcile())
            tasks.create_task(self.bases.run())

    async def _reconcile(self) -> None:
        clear_at = self.monotonic() + CLEAR_S
        while True:
            self.changed.clear()
            try:
                await self.library.open()
                await self.declared.step()
                if self.monotonic() >= clear_at:
                    clear_at = self.monotonic() + CLEAR_S
                    await self.library.clear(self._in_use())
            except (TidegateError, OSError) as error:
                self.event(f"adapters: {error}")
            except Exception:
                # An unforeseen error must not stop the loop: existing adapters must be kept available.
                log.exception("adapters")
            await wait_at_most(self.changed, STEP_S)

    def _replicas(self, model: str) -> list[Replica]:
        return [replica for replica in self._fleet() if replica.model == model]

    def _fleet(self) -> tuple[Replica, ...]:
        return self.registry.fleet(self.wall()).replicas

    def _in_use(self) -> set[str]:
        """Serving names of the adapters that replicas have loaded or that are planned for them."""
        loaded = {name for replica in self._fleet() for name in replica.adapters}
        holds = self._placement.holds.values()
        return loaded | {served_name(each.name, each.digest) for hold in holds for each in hold}
