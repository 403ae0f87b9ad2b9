"""A controller of models that Tidegate did not start, beside its own in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from policy.wire.heartbeat import Heartbeat
from serve.actuator.by_engine import ActuatorByEngine
from serve.actuator.kubernetes import KubernetesActuator
from serve.controller.controller import Controller
from store.state_dir import StateDir
from tests.serve.fake_adapter_store import FakeAdapterStore
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster
from tests.serve.sim_documents import deployment, document


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


@asynccontextmanager
async def controlling(
    state: StateDir, *models: dict[str, Any], cluster: MemoryCluster | None = None
) -> AsyncIterator[Controller]:
    """A controller of these models; those that Tidegate starts run in memory, in ``cluster``."""
    written = document(*models)
    state.save(state.deployment_path, written)
    workloads = KubernetesActuator(state, deployment(*models).models)
    cluster = cluster or MemoryCluster(lambda replica: None)
    cluster.beat = lambda replica: controller.beat(Heartbeat(replica=replica))
    by_engine = ActuatorByEngine(MemoryActuator(cluster), workloads)
    controller = Controller(
        by_engine, state, 1, lambda: FakeAdapterStore(state.root),
        wall=time.time, monotonic=time.monotonic, by_engine=by_engine,
    )  # fmt: skip
    tasks = [
        asyncio.create_task(work)
        for work in (workloads.report(controller.beat, every_s=0.02), controller.run())
    ]
    try:
        await controller.wait_until_restored()
        yield controller
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await workloads.close()
