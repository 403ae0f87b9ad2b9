"""The adapter part of the controller: which adapters exist, how they are used, and where they are placed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from policy.config.deployment import Deployment
from policy.errors import TidegateError
from policy.types import Replica
from policy.wire.catalog import served_name
from policy.wire.heartbeat import Heartbeat, Orders
from serve.adapters.adapter_demand import AdapterDemand
from serve.adapters.library import AdapterLibrary
from serve.adapters.placement import AdapterPlacement
from serve.adapters.reconcile_declared import DeclaredAdapters
from serve.adapters.status import AdapterOverview, AdaptersStatus, AdapterState, AdapterStatus
from serve.state.replica_registry import ReplicaRegistry
from serve.threads import wait_at_most
from store.state_dir import StateDir

if TYPE_CHECKING:
    from serve.adapters.adapter_store import AdapterStore  # imports the database, which takes long

log = logging.getLogger("tidegate.adapters")

STEP_S = 1.0
CLEAR_S = 60.0


class AdapterController:
    """Composition root. ``slots`` gives the number of adapter slots of a replica."""

    def __init__(
        self,
        open_store: Callable[[], AdapterStore],
        registry: ReplicaRegistry,
        state: StateDir,
        epoch: float,
        *,
        slots: Callable[[Replica], int],
        wall: Callable[[], float],
        monotonic: Callable[[], float],
        event: Callable[[str], None],
    ) -> None:
        self._registry = registry
        self._wall = wall
        self._monotonic = monotonic
        self._event = event
        self._demand = AdapterDemand()
        self._placing = AdapterPlacement(self._demand, slots)
        self.changed = asyncio.Event()
        self.library = AdapterLibrary(open_store, epoch, event)
        self.declared = DeclaredAdapters(self.library, state, monotonic)

    def declare(self, deployment: Deployment, *, applied: bool) -> None:
        """Set the deployment; if it was just ``applied``, its adapter sources are checked for changes."""
        self.library.declare(deployment)
        self.declared.declare(deployment, applied=applied)
        self.changed.set()

    def beat(self, beat: Heartbeat) -> Orders:
        """Record the adapter usage of a registered replica; the adapters that are planned for it."""
        now = self._monotonic()
        self._demand.note(beat, now)
        replica = beat.replica
        if replica.model in self.library.catalog.models and self._placing.lacks(replica):
            # A starting replica gets its plan at once, so that it can load adapters before traffic.
            self._plan(replica.model, now)
        return self._placing.orders(replica.id)

    def place(self) -> None:
        """Make the placement plans that are due."""
        now = self._monotonic()
        due = [model for model in self.library.catalog.models if self._placing.due(model, now)]
        if due:
            replicas = [replica.id for replica in self._fleet()]
            self._demand.keep(replicas)
            self._placing.keep(self.library.catalog.models, replicas)
        for model in due:
            self._plan(model, now)

    def status(self) -> AdaptersStatus:
        """The status of all adapters."""
        now, wall = self._monotonic(), self._wall()
        adapters: dict[tuple[str, str], AdapterStatus] = {}
        troubles, fetching = self.declared.troubles, self.library.fetching()
        for model in self.library.catalog.models:
            overview = AdapterOverview(self._replicas(model), self._demand, self._placing, now, wall)
            for alias in self.library.catalog.of(model):
                key = (alias.model, alias.name)
                trouble = troubles.get(key)
                adapters[key] = overview.of(alias, trouble.reason if trouble else fetching.get(key, ""))
        for key in {**troubles, **fetching}:
            if key not in adapters:
                trouble = troubles.get(key)
                refused = trouble is not None and trouble.refused
                adapters[key] = AdapterStatus(
                    model=key[0],
                    name=key[1],
                    state=AdapterState.FAILED if refused else AdapterState.FETCHING,
                    note=trouble.reason if trouble else fetching[key],
                )
        shown = tuple(adapters[key] for key in sorted(adapters))
        return AdaptersStatus(at=wall, models=self.library.catalog.models, adapters=shown)

    async def run(self) -> None:
        """Reconcile declared adapters and delete unused files, until cancelled."""
        clear_at = self._monotonic() + CLEAR_S
        await self.library.open()
        while True:
            self.changed.clear()
            try:
                await self.declared.step()
                if self._monotonic() >= clear_at:
                    clear_at = self._monotonic() + CLEAR_S
                    await self.library.clear(self._in_use())
            except (TidegateError, OSError) as error:
                self._event(f"adapters: {error}")
            except Exception:
                # An unforeseen error must not stop the loop: existing adapters must be kept available.
                log.exception("adapters")
            await wait_at_most(self.changed, STEP_S)

    def _plan(self, model: str, now: float) -> None:
        self._placing.plan(model, self._replicas(model), self.library.catalog.of(model), now)

    def _replicas(self, model: str) -> list[Replica]:
        return [replica for replica in self._fleet() if replica.model == model]

    def _fleet(self) -> tuple[Replica, ...]:
        return self._registry.fleet(self._wall()).replicas

    def _in_use(self) -> set[str]:
        """Serving names of the adapters that replicas have loaded or that are planned for them."""
        loaded = {name for replica in self._fleet() for name in replica.adapters}
        holds = self._placing.holds.values()
        return loaded | {served_name(each.name, each.digest) for hold in holds for each in hold}
