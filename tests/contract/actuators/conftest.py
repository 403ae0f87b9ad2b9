"""The backends of the contract; a process joins one Ray head in its life, as Ray keeps its token."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.config.deployment import Cluster
from serve.actuator.local import LocalActuator
from serve.ray_cluster import join
from store.state_dir import StateDir
from tests.contract.actuators.site import Backend, heartbeat_server
from tests.ports import free_ports
from tests.ray_head import RayHead
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster


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


@pytest.fixture(
    params=[
        "memory",
        pytest.param("local", marks=pytest.mark.process),
        pytest.param("ray", marks=[pytest.mark.process, pytest.mark.ray]),
    ]
)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "memory":
        cluster = MemoryCluster(lambda replica: made.receive(replica))  # noqa: PLW0108 - it is set later
        made = Backend(lambda: MemoryActuator(cluster), cluster=cluster)
        yield made
        return
    if request.param == "ray":
        head: RayHead = request.getfixturevalue("ray_site")
        dashboard, token = request.getfixturevalue("ray_joined")
        from serve.actuator.ray import RayActuator  # noqa: PLC0415 - Ray is loaded by joining

        state, cluster = head.state, head.deployment.cluster
        made = Backend(
            lambda: RayActuator(state, cluster, dashboard, token), cluster.controller, state.secret()
        )
    else:
        state, controller = StateDir(tmp_path / "local").ensure(), f"127.0.0.1:{free_ports(1)[0]}"
        made = Backend(
            lambda: LocalActuator(state, Cluster(controller=controller)), controller, state.secret()
        )
    with heartbeat_server(made):
        yield made
