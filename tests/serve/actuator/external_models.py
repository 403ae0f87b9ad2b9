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
from tests.kubernetes_api import DEPLOYMENTS, STATEFUL_SETS, KubernetesApi
from tests.serve.fake_adapter_store import FakeAdapterStore
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster
from tests.serve.sim_documents import deployment, document


@asynccontextmanager
async def workloads(*, small: int = 0, **more: int) -> AsyncIterator[KubernetesApi]:
    """A StatefulSet and a Deployment for the shapes of a model, and Deployments with ``more`` names."""
    api = KubernetesApi()
    await api.start()
    api.workload(STATEFUL_SETS, "small", replicas=small)
    for name, replicas in {"large": 0, **more}.items():
        api.workload(DEPLOYMENTS, name, replicas=replicas)
    yield api
    await api.stop()


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
    external = KubernetesActuator(state, deployment(*models).models)
    cluster = cluster or MemoryCluster(lambda replica: None)
    cluster.beat = lambda replica: controller.beat(Heartbeat(replica=replica))
    by_engine = ActuatorByEngine(MemoryActuator(cluster), external)
    controller = Controller(
        by_engine, state, 1, lambda: FakeAdapterStore(state.root),
        wall=time.time, monotonic=time.monotonic, by_engine=by_engine,
    )  # fmt: skip
    tasks = [
        asyncio.create_task(work)
        for work in (external.report(controller.beat, every_s=0.02), controller.run())
    ]
    try:
        await controller.wait_until_restored()
        yield controller
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await external.close()
