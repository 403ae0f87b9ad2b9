"""The application specification for Ray Serve, and the layers read from its status."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.config.deployment import Cluster
from policy.config.shared_gpus import gpu_group_of
from policy.engine.builtin_profiles import shipped
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator.interface import ActuatorLayer
from serve.actuator.serve_application_status import (
    SIM_CPUS,
    application_name,
    held_layers,
    missing_resources,
    required_resources,
)
from tests.serve.plane import SMALL, Plane
from tests.serve.sim_documents import deployment, document, sim_model

# The message of Serve of Ray 2.60.
MESSAGE = (
    "Deployment 'replica' in application 'a' has 1 replicas that have taken more than 30s to be scheduled. "
    "This may be due to waiting for the cluster to auto-scale or for a runtime environment to be installed. "
    'Resources required for each replica: {"CPU": 1.0, "GPU": 4.0}, '
    'total resources available: {"CPU": 0.5}. Use `ray status` for more details.'
)
MISSING = 'no node has room for 1 of {"CPU": 1.0, "GPU": 4.0}: {"CPU": 0.5} is free'


def reported(state: str, node_id: str | None, message: str = MESSAGE) -> dict[str, Any]:
    return {
        "message": message,
        "replicas": [{"state": "RUNNING", "node_id": "n"}, {"state": state, "node_id": node_id}],
        "target_num_replicas": 2,
    }


@pytest.mark.parametrize(
    ("state", "node_id", "message", "missing"),
    [
        ("STARTING", None, MESSAGE, MISSING),
        # Serve keeps its last message until the next one.
        ("STARTING", "n", MESSAGE, ""),
        ("STOPPING", None, MESSAGE, ""),
        ("STARTING", None, "", ""),
    ],
)
def test_missing_resources_are_read_from_the_status_message_of_ray_serve(
    state: str, node_id: str | None, message: str, missing: str
) -> None:
    assert missing_resources(reported(state, node_id, message)) == missing


def test_only_live_applications_of_this_deployment_are_its_layers() -> None:
    key = LayerKey("org/m", "small", 3)

    def application(status: str, **deployments: Any) -> dict[str, Any]:
        return {"status": status, "message": "of the application", "deployments": deployments}

    name = application_name("d", key, "f00")
    deploying = [LayerKey("m", "large", generation) for generation in (2, 3)]
    refused = LayerKey("m", "large", 4)
    broken = application_name("d", LayerKey("m", "large", 1), "bad")
    answer = {
        "applications": {
            name: application("RUNNING", replica=reported("STARTING", None)),
            broken: application("DEPLOY_FAILED", replica=reported("STOPPING", None)),
            application_name("d", key, "d"): application("DELETING", replica=reported("STOPPING", None)),
            **{application_name("d", at, "e"): application("DEPLOYING") for at in deploying},
            application_name("d", refused, "e"): application("DEPLOY_FAILED"),
            application_name("other", key, "f"): application("RUNNING", replica=reported("RUNNING", "n")),
            "of another program": application("RUNNING", replica=reported("RUNNING", "n")),
        }
    }
    # Serve does not list the deployments of these yet; the count of the second one is not known.
    counts = {application_name("d", deploying[0], "e"): 4}
    assert list(held_layers(answer, "d", counts)) == [
        (key, name, ActuatorLayer(wanted=2, digest="f00", waits=MISSING, unplaced=1)),
        (LayerKey("m", "large", 1), broken, ActuatorLayer(wanted=2, digest="bad", trouble=MESSAGE)),
        *(
            (at, application_name("d", at, "e"), ActuatorLayer(wanted=wanted, digest="e"))
            for at, wanted in zip(deploying, (4, 1), strict=True)
        ),
        (
            refused,
            application_name("d", refused, "e"),
            ActuatorLayer(wanted=1, digest="e", trouble="of the application"),
        ),
    ]


def test_a_shared_gpu_group_requires_its_gpus_once_and_the_cores_of_all_engines() -> None:
    model = sim_model(
        engine="vllm",
        source="ORG/NAME",
        sim={},
        shapes={"large": {"gpus": 8, "tensor_parallel": 8, "cpus": 10}, "small": {"gpus": 1, "cpus": 2}},
    )
    spec = deployment(model).models[0]
    assert required_resources(spec, spec.shapes["large"], Cluster()) == {"num_gpus": 8, "num_cpus": 16}
    model["control"]["mode"]["sleep"] = "never"
    separate = deployment(model).models[0]
    assert required_resources(separate, separate.shapes["small"], Cluster()) == {"num_gpus": 1, "num_cpus": 2}


def test_simulated_engines_require_simulated_gpus_alone() -> None:
    spec = deployment(
        sim_model(shapes={"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}})
    ).models[0]
    for announced, gpus in ((None, 0), (8, 1)):
        cluster = Cluster(simulated_gpus=announced)
        assert required_resources(spec, spec.shapes["small"], cluster)["num_gpus"] == gpus


def test_a_shape_may_have_a_fraction_of_a_gpu_of_a_type_and_custom_resources() -> None:
    small = {"gpus": 0.25, "accelerator_type": "L4", "resources": {"fast_disk": 1}}
    model = sim_model(
        shapes={"large": {"gpus": 1}, "small": small}, sim={"profile": "sim-small", "wake_s": 1.0}
    )
    spec = deployment(model).models[0]
    assert required_resources(spec, spec.shapes["small"], Cluster(simulated_gpus=8)) == {
        "num_gpus": 0.25, "num_cpus": SIM_CPUS, "accelerator_type": "L4", "resources": {"fast_disk": 1.0}
    }  # fmt: skip
    # Parts of a GPU cannot take turns with the whole of it.
    assert gpu_group_of(spec) is None
    # A part has that part of the time and of the memory.
    whole, part = (shipped(spec, spec.shapes[name]) for name in ("large", "small"))
    assert whole.model is not None and part.model is not None
    assert part.model.w == 4 * whole.model.w
    assert 0 < part.limits.kv_tokens <= whole.limits.kv_tokens / 4


async def test_the_status_names_missing_resources(plane: Plane) -> None:
    await plane.up(document(sim_model()))
    plane.cluster.slow = True
    plane.controller.scale("m", 2)
    await plane.ticks(2)
    plane.cluster.held[SMALL] = msgspec.structs.replace(plane.cluster.held[SMALL], waits="no room")
    await plane.ticks(1)
    assert plane.note() == "no room"
