"""The backends of the contract; a process joins one Ray head in its life, as Ray keeps its token."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policy.config.deployment import Cluster, Deployment
from policy.wire.heartbeat import Heartbeat, HeartbeatResponse
from serve.actuator.interface import Actuator
from serve.actuator.kubernetes import KubernetesActuator
from serve.actuator.local import LocalActuator
from serve.ray_launcher import join
from store.state_dir import StateDir
from tests.contract.actuators.site import Backend, heartbeat_server
from tests.kubernetes_api import (
    DEPLOYMENTS,
    LEADER_WORKER_SETS,
    NUMBERED,
    STATEFUL_SETS,
    KubernetesApi,
    running_elsewhere,
)
from tests.ports import free_ports
from tests.ray_head import RayHead
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster
from tests.serve.sim_documents import deployment, external_model

KINDS = {"deployment": DEPLOYMENTS, "statefulset": STATEFUL_SETS, "leaderworkerset": LEADER_WORKER_SETS}


@pytest.fixture(scope="package")
def ray_joined(ray_site: RayHead) -> Iterator[tuple[str, str]]:
    assert "ray" not in sys.modules, "Ray reads its token mode when it is loaded: join before importing it"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
            patch.delenv(name, raising=False)
        before = dict(os.environ)
        yield join(ray_site.deployment, ray_site.state)
        import ray  # noqa: PLC0415 - only what asks for Ray loads it

        ray.shutdown()
        for name in set(os.environ) - set(before):
            del os.environ[name]


class ReportingActuator(KubernetesActuator):
    """Sends heartbeats as a controller process has it do."""

    def __init__(
        self, state: StateDir, deployment: Deployment, take: Callable[[Heartbeat], HeartbeatResponse | None]
    ):
        super().__init__(state, deployment.models)
        self._reporting = asyncio.create_task(self.report(take, every_s=0.02))

    async def close(self) -> None:
        self._reporting.cancel()
        await super().close()


@contextmanager
def workloads(root: Path, kind: str) -> Iterator[Backend]:
    """Workloads of a double of Kubernetes that exist and have no pods; the small ones are of ``kind``."""
    api = KubernetesApi()
    with running_elsewhere(api):
        api.workload(KINDS[kind], "small")
        api.workload(DEPLOYMENTS, "large")
        state, written = StateDir(root / "kubernetes").ensure(), external_model(api.url)
        written["shapes"]["small"]["workload"] = f"{kind}/small"
        made = Backend(
            lambda: ReportingActuator(state, deployment(written), lambda beat: made.receive(beat.replica)),
            models=(written,),
            has_processes=False,
            numbered=KINDS[kind] in NUMBERED,
        )
        yield made


def orders_of(head: RayHead, dashboard: str, token: str, term: int) -> Actuator:
    """The actuator of an elected controller of ``term``."""
    from serve.actuator.ray_term_fence import RayOrders, Term  # noqa: PLC0415 - Ray is loaded by joining

    state, cluster = head.state, head.deployment.cluster
    return RayOrders(
        Term(
            number=term, root=str(state.root), secret=state.secret(), cluster=cluster,
            dashboard=dashboard, token=token,
        )
    )  # fmt: skip


@pytest.fixture(
    params=[
        "memory",
        *KINDS,
        pytest.param("local", marks=pytest.mark.process),
        pytest.param("ray", marks=[pytest.mark.process, pytest.mark.ray]),
        pytest.param("ray of an elected controller", marks=[pytest.mark.process, pytest.mark.ray]),
    ]
)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "memory":
        cluster = MemoryCluster(lambda replica: made.receive(replica))  # noqa: PLW0108 - it is set later
        made = Backend(lambda: MemoryActuator(cluster), cluster=cluster, has_processes=False)
        yield made
        return
    if request.param in KINDS:
        with workloads(tmp_path, request.param) as made:
            yield made
        return
    if request.param.startswith("ray"):
        head: RayHead = request.getfixturevalue("ray_site")
        dashboard, token = request.getfixturevalue("ray_joined")
        from serve.actuator.ray import RayActuator  # noqa: PLC0415 - Ray is loaded by joining

        state, cluster = head.state, head.deployment.cluster

        def make() -> Actuator:
            if request.param == "ray":
                return RayActuator(state, cluster, dashboard, token)
            return orders_of(head, dashboard, token, term=1)

        made = Backend(make, cluster.controller, state.secret())
    else:
        state, controller = StateDir(tmp_path / "local").ensure(), f"127.0.0.1:{free_ports(1)[0]}"
        made = Backend(
            lambda: LocalActuator(state, Cluster(controller=controller)), controller, state.secret()
        )
    with heartbeat_server(made):
        yield made
