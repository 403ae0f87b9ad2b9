"""Tidegate's own replicas and external models: while one actuator fails, the other's models go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from policy.errors import Unreachable
from policy.scaling.reconcile_steps import LayerKey
from serve.controller import controller as control_loop
from serve.controller.controller import Controller
from serve.controller_api_schema import ModelStatus
from store.state_dir import StateDir
from tests.kubernetes_api import KubernetesApi
from tests.serve.actuator.external_models import controlling, eventually, workloads
from tests.serve.memory_actuator import MemoryCluster
from tests.serve.sim_documents import document, external_model, sim_model

OWN = LayerKey("own", "small", 1)
STATIC = {"policy": "static"}


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with workloads(small=2) as made:
        yield made


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.setattr(control_loop, "RETRY_S", 0.02)
    return StateDir(tmp_path / "state").ensure()


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster(lambda replica: None)


def status(controller: Controller, name: str) -> ModelStatus:
    (found,) = [model for model in controller.status().models if model.name == name]
    return found


@pytest.mark.parametrize("stored", [False, True])
async def test_an_api_server_that_refuses_holds_up_no_model_of_our_own(
    api: KubernetesApi, state: StateDir, cluster: MemoryCluster, stored: bool
) -> None:
    models = external_model(api.url, control=STATIC), sim_model("own", control=STATIC)
    if stored:
        async with controlling(state, *models, cluster=cluster) as controller:
            controller.scale("m", 3)
            await eventually(lambda: status(controller, "m").ready == 3)
    api.refuses = lambda asked: 403
    async with controlling(state, *models, cluster=cluster) as controller:
        cluster.beat_all()
        await eventually(lambda: status(controller, "own").ready == 1)
        controller.scale("own", 2)
        controller.apply(document(*models))
        await eventually(lambda: status(controller, "own").ready == 2)
        unknown = status(controller, "m")
        assert unknown.phase == "unknown"
        assert "restoring the target failed: kubernetes: " in unknown.note
        with pytest.raises(Unreachable, match=r"m: kubernetes: .*; try again"):
            controller.scale("m", 1)
        # Gateways are told no counts for it: another autoscaler would carry them out.
        assert [model.name for model in controller.fleet().models] == ["own"]
        api.refuses = lambda asked: 0
        await eventually(lambda: status(controller, "m").ready == (3 if stored else 2))
        assert (status(controller, "m").target, status(controller, "m").generation) == (3 if stored else 2, 1)
        assert status(controller, "m").note == ""


async def test_a_new_deployment_corrects_where_the_pods_are(
    api: KubernetesApi, state: StateDir, cluster: MemoryCluster
) -> None:
    api.refuses = lambda asked: 403 if "/wrong/" in asked else 0
    own = sim_model("own", control=STATIC)
    wrong = external_model(api.url, kubernetes={"namespace": "wrong"}, control=STATIC)
    async with controlling(state, wrong, own, cluster=cluster) as controller:
        await eventually(lambda: status(controller, "own").ready == 1)
        assert status(controller, "m").phase == "unknown"
        controller.apply(document(external_model(api.url, control=STATIC), own))
        await eventually(lambda: status(controller, "m").ready == 2)
        # One that is removed is forgotten.
        controller.apply(document(own))
        await eventually(lambda: [model.name for model in controller.status().models] == ["own"])


async def test_a_cluster_that_is_away_holds_up_no_external_model(
    api: KubernetesApi, state: StateDir, cluster: MemoryCluster
) -> None:
    models = external_model(api.url, control=STATIC), sim_model("own", control=STATIC)
    async with controlling(state, *models, cluster=cluster) as controller:
        await eventually(lambda: {each.ready for each in controller.status().models} == {1, 2})
        cluster.down = "Ray does not answer"
        controller.scale("m", 4)
        controller.scale("own", 3)
        away = "control step failed: memory: Ray does not answer"
        await eventually(
            lambda: status(controller, "m").ready == 4 and status(controller, "own").note == away
        )
        assert cluster.held[OWN].wanted == 1
        cluster.down = ""
        await eventually(lambda: status(controller, "own").ready == 3)
        assert status(controller, "own").note == ""
