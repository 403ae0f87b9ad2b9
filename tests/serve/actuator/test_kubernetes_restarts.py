"""A controller that starts finds the workloads of revisions and models that its deployment no longer has."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from policy.errors import ActuatorFailed
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator import kubernetes
from serve.actuator.kubernetes import KubernetesActuator
from store.state_dir import StateDir
from tests.kubernetes_api import DEPLOYMENTS, KubernetesApi
from tests.serve.actuator.external_models import controlling, eventually, workloads
from tests.serve.sim_documents import deployment, document, external_model, sim_model

BEFORE, AFTER = LayerKey("m", "small", 1), LayerKey("m", "small", 2)
LARGE = LayerKey("m", "large", 1)


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with workloads(small=3, new=0) as made:
        yield made


async def test_a_rollout_and_a_removal_that_a_restart_cuts_short_are_completed(
    api: KubernetesApi, state: StateDir
) -> None:
    before, own = external_model(api.url, control={"policy": "static"}), sim_model("own")
    after = before | {"shapes": before["shapes"] | {"small": {"gpus": 1, "workload": "deployment/new"}}}
    async with controlling(state, before, own) as controller:
        await eventually(lambda: controller.status().models[0].ready == 3)
        api.slow = True
        controller.apply(document(after, own))
        await eventually(lambda: bool(api.pods("new")))
    assert len(api.pods("small")) == 3
    async with controlling(state, after, own) as controller:
        await eventually(lambda: len(controller.fleet().replicas) > 3)
        assert len(api.pods("small")) == 3
        api.slow = False
        api.become_ready()
        await eventually(lambda: not api.pods("small") and bool(api.pods("new")))
        api.refuses = lambda asked: 403 if asked.startswith("PATCH") else 0
        controller.apply(document(own))
    api.refuses = lambda asked: 0
    async with controlling(state, own) as controller:
        await eventually(lambda: not api.pods("new"))
        await eventually(lambda: [model.name for model in controller.status().models] == ["own"])


async def test_all_that_a_model_runs_at_the_start_is_found_after_the_first_order(
    api: KubernetesApi, state: StateDir
) -> None:
    api.scale(DEPLOYMENTS, "large", 2)
    (spec,) = deployment(external_model(api.url)).models
    actuator = KubernetesActuator(state, [spec])
    assert set(await actuator.layers()) == {BEFORE, LARGE}
    await actuator.scale(LARGE, 1)
    assert {key: layer.wanted for key, layer in (await actuator.layers()).items()} == {BEFORE: 3, LARGE: 1}
    await actuator.close()


async def test_a_place_of_earlier_revisions_is_given_up_if_it_fails_for_long(
    api: KubernetesApi, state: StateDir, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = external_model(api.url)
    (earlier,) = deployment(model).models
    model["shapes"]["small"]["workload"] = "deployment/new"
    (spec,) = deployment(model).models
    first, begun = (KubernetesActuator(state, [spec]) for _ in range(2))
    for actuator in (first, begun):
        actuator.declare([spec], [earlier])
    await first.deploy(BEFORE, earlier, None, "d", 3)
    await first.deploy(AFTER, spec, None, "d", 1)
    assert set(await first.layers()) == {BEFORE, AFTER}
    api.refuses = lambda asked: 403 if "statefulsets" in asked else 0
    with pytest.raises(ActuatorFailed, match="answered 403"):
        await begun.layers()
    monkeypatch.setattr(kubernetes, "GIVE_UP_S", 0.0)
    # Not the one whose pods are known.
    with pytest.raises(ActuatorFailed, match="answered 403"):
        await first.scale(AFTER, 2)
    begun.declare([spec], [earlier])
    assert set(await begun.layers()) == {AFTER}
    assert "statefulsets are no longer looked for" in caplog.text
    for actuator in (first, begun):
        await actuator.close()


async def test_a_place_that_a_model_has_left_may_be_gone(
    api: KubernetesApi, state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = external_model(api.url)
    (earlier,) = deployment(model).models
    model["shapes"]["small"]["workload"] = "deployment/new"
    (spec,) = deployment(model).models
    actuator = KubernetesActuator(state, [earlier])
    assert set(await actuator.layers()) == {BEFORE}
    actuator.declare([spec], [earlier, spec])
    await actuator.deploy(AFTER, spec, None, "d", 1)
    assert set(await actuator.layers()) == {BEFORE, AFTER}
    await actuator.delete(BEFORE)
    assert set(await actuator.layers()) == {AFTER}
    monkeypatch.setattr(kubernetes, "GIVE_UP_S", 0.0)
    api.refuses = lambda asked: 403 if "statefulsets" in asked else 0
    await actuator.scale(AFTER, 2)
    assert (await actuator.layers())[AFTER].wanted == 2
    await actuator.close()
