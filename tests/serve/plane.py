"""A controller over replicas in memory, with a clock that only tests move."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

from policy.scaling.reconcile_steps import LayerKey
from policy.types import Replica, ReplicaPhase
from policy.wire.controller_reports import GpuReport
from policy.wire.headers import SECRET_HEADER
from policy.wire.heartbeat import Heartbeat, HeartbeatResponse
from serve.controller.controller import Controller
from serve.controller.routes import build_app
from serve.state.desired_state import ModelTarget
from store.state_dir import StateDir
from tests.serve.fake_adapter_store import FakeAdapterStore
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster

SMALL, LARGE, NEW_SMALL = LayerKey("m", "small", 1), LayerKey("m", "large", 1), LayerKey("m", "small", 2)
READY = ReplicaPhase.READY


@dataclass
class Plane:
    """A controller, its cluster, and the time."""

    state: StateDir
    now: float = 1000.0
    # The lead of the wall clock over the monotonic clock.
    ahead: float = 0.0
    store: FakeAdapterStore = field(init=False)
    # GPU reports of replicas by id.
    gpu_reports: dict[str, GpuReport] = field(default_factory=dict)
    cluster: MemoryCluster = field(init=False)
    controller: Controller = field(init=False)

    def __post_init__(self) -> None:
        self.store = FakeAdapterStore(self.state.root)

    async def up(self, written: dict[str, Any]) -> Plane:
        self.cluster = MemoryCluster(self._beat)
        self.state.save(self.state.deployment_path, written)
        await self.restart()
        return self

    async def ready(self, written: dict[str, Any]) -> None:
        """As :meth:`up`, and let the replicas start."""
        await self.up(written)
        await self.ticks()

    async def restart(self) -> None:
        """Replace the controller, as after a kill; its hosts continue."""
        self.replace()
        await self.controller.rebuild()

    def replace(self) -> None:
        """Replace the controller by one that has read nothing yet."""
        actuator = MemoryActuator(self.cluster)
        self.controller = Controller(
            actuator, self.state, 1, lambda: self.store, wall=self.clock, monotonic=self.monotonic
        )

    def client(self) -> httpx.AsyncClient:
        """A client of the controller's HTTP API."""
        transport = httpx.ASGITransport(build_app(self.controller, "s"))
        return httpx.AsyncClient(transport=transport, base_url="http://c", headers={SECRET_HEADER: "s"})

    def clock(self) -> float:
        return self.now + self.ahead

    def monotonic(self) -> float:
        return self.now - 700.0

    def target(self, model: str = "m") -> ModelTarget:
        """That with which another controller would continue."""
        targets = self.state.load(self.state.targets_path, dict[str, ModelTarget])
        assert targets is not None
        return targets[model]

    def _beat(self, replica: Replica) -> HeartbeatResponse:
        return self.controller.beat(Heartbeat(replica=replica, gpus=self.gpu_reports.get(replica.id)))

    async def ticks(self, count: int = 12) -> None:
        for _ in range(count):
            self.now += 0.2
            self.cluster.beat_all()
            await self.controller.tick()

    def counts(self, *states: ReplicaPhase) -> dict[LayerKey, int]:
        """Replicas by layer, in ``states`` or in any."""
        found: dict[LayerKey, int] = {}
        for replica in self.cluster.replicas.values():
            if replica.state in (states or tuple(ReplicaPhase)):
                key = LayerKey.of(replica)
                found[key] = found.get(key, 0) + 1
        return found

    def phase(self) -> str:
        return self.controller.status().models[0].phase

    def note(self) -> str:
        return self.controller.status().models[0].note
