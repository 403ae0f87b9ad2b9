"""The controller's part that is about adapters: which there are, how they are used, and what lives where."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from policy.config.deployment import Deployment
from policy.errors import TidegateError
from policy.types import Replica
from policy.wire.catalog import served_name
from policy.wire.heartbeat import Heartbeat, Orders
from serve.adapters.declared import DeclaredAdapters
from serve.adapters.library import AdapterLibrary
from serve.adapters.placement import AdapterPlacement
from serve.adapters.status import AdapterOverview, AdaptersStatus, AdapterState, AdapterStatus
from serve.adapters.store_port import AdapterStore
from serve.adapters.usage import AdapterDemand
from serve.state.replica_registry import ReplicaRegistry
from store.state_dir import StateDir

log = logging.getLogger("tidegate.adapters")

STEP_S = 1.0
CLEAR_S = 60.0


class AdapterController:
    """Composes them. ``slots`` says how many adapters a replica can have loaded at once."""

    def __init__(
        self,
        shelf: Callable[[], AdapterStore],
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
        self._stirred = asyncio.Event()
        self.library = AdapterLibrary(shelf, epoch, event)
        self.declaring = DeclaredAdapters(self.library, state, monotonic)

    def declare(self, deployment: Deployment, *, applied: bool) -> None:
        """Take the document; one that was ``applied`` just now has its sources looked at again."""
        self.library.declare(deployment)
        self.declaring.declare(deployment, applied=applied)
        self._stirred.set()

    def beat(self, beat: Heartbeat) -> Orders:
        """Take what a replica, which the registry knows, did with adapters; returns what it should hold."""
        now = self._monotonic()
        self._demand.note(beat, now)
        replica = beat.replica
        if replica.model in self.library.models and self._placing.lacks(replica):
            # One that starts is told at once: it loads before it takes traffic.
            self._plan(replica.model, now)
        return self._placing.orders(replica.id)

    def place(self) -> None:
        """Make the plans that are due."""
        now = self._monotonic()
        due = [model for model in self.library.models if self._placing.due(model, now)]
        if due:
            replicas = [replica.id for replica in self._fleet()]
            self._demand.keep(replicas)
            self._placing.keep(self.library.models, replicas)
        for model in due:
            self._plan(model, now)

    def status(self) -> AdaptersStatus:
        """What there is to say of each adapter."""
        now, wall = self._monotonic(), self._wall()
        adapters: dict[tuple[str, str], AdapterStatus] = {}
        troubles, fetching = self.declaring.troubles, self.library.fetching()
        for model in self.library.models:
            overview = AdapterOverview(self._replicas(model), self._demand, self._placing, now, wall)
            for alias in self.library.aliases(model):
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
        return AdaptersStatus(at=wall, models=self.library.models, adapters=shown)

    async def run(self) -> None:
        """Bring about what is declared and clear away what nobody names, until cancelled."""
        clear_at = self._monotonic() + CLEAR_S
        await self.library.open()
        while True:
            self._stirred.clear()
            try:
                await self.declaring.step()
                if self._monotonic() >= clear_at:
                    clear_at = self._monotonic() + CLEAR_S
                    await self.library.clear(self._in_use())
            except (TidegateError, OSError) as error:
                self._event(f"adapters: {error}")
            except Exception:
                # Whatever it is, what is there must be kept up, and models must be served.
                log.exception("adapters")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STEP_S):
                    await self._stirred.wait()

    def _plan(self, model: str, now: float) -> None:
        self._placing.plan(model, self._replicas(model), self.library.aliases(model), now)

    def _replicas(self, model: str) -> list[Replica]:
        return [replica for replica in self._fleet() if replica.model == model]

    def _fleet(self) -> tuple[Replica, ...]:
        return self._registry.fleet(self._wall()).replicas

    def _in_use(self) -> set[str]:
        """Serving names of what replicas have or were told to have."""
        loaded = {name for replica in self._fleet() for name in replica.adapters}
        holds = self._placing.holds.values()
        return loaded | {served_name(each.name, each.digest) for hold in holds for each in hold}
