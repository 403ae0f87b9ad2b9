"""Shapes that no node has room for, and shapes that must wait for one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.errors import ConfigError
from serve.actuator.interface import NodeResources
from serve.actuator.placement_feasibility import check_placeable, machine
from tests.serve.plane import LARGE, SMALL, Plane
from tests.serve.sim_documents import deployment, document, sim_model

SIMULATED = {"address": "10.0.0.1:6379", "controller": "10.0.0.1:7070", "simulated_gpus": 8}
NODES = (
    NodeResources(resources={"GPU": 4.0, "CPU": 8.0, "accelerator_type:L4": 1.0}),
    NodeResources(resources={"GPU": 2.0, "CPU": 8.0, "accelerator_type:H100": 1.0, "fast_disk": 1.0}),
)


def gpus(large: int = 4, **over: Any) -> dict[str, Any]:
    shapes = {"large": {"gpus": large, "tensor_parallel": large, **over}, "small": {"gpus": 1}}
    return sim_model(shapes=shapes)


@pytest.mark.parametrize(
    ("model", "path", "expected"),
    [
        (gpus(4), "", ""),
        (gpus(8), "models[0].shapes.large.gpus", "at most 4"),
        (gpus(4, accelerator_type="L4"), "", ""),
        (gpus(2, accelerator_type="H100", resources={"fast_disk": 1}), "", ""),
        # Each is somewhere, but not on one node.
        (
            gpus(4, accelerator_type="H100"),
            "models[0].shapes.large",
            "GPU 4, CPU 8, accelerator_type:H100 0;",
        ),
        (
            sim_model(
                sim={"wake_s": 1},
                shapes={"large": {"gpus": 4, "tensor_parallel": 4}, "small": {"gpus": 1}},
                modes={"tp4": {"shape": "large", "replicas": 2}, "tp1": {"shape": "small", "replicas": 8}},
            ),
            "models[0].modes",
            "at most 4 GPUs in any mode",
        ),
        (gpus(1, resources={"tape": 1}), "models[0].shapes.large", "tape 0"),
    ],
)
def test_a_shape_that_no_node_has_room_for_is_refused(
    model: dict[str, Any], path: str, expected: str
) -> None:
    made = deployment(model, cluster=SIMULATED)
    # Nothing is known of the nodes that an autoscaler adds.
    check_placeable(made, ())
    if not path:
        check_placeable(made, NODES)
        return
    with pytest.raises(ConfigError) as refused:
        check_placeable(made, NODES)
    assert refused.value.path == path
    assert expected in refused.value.expected


def test_without_ray_only_gpus_are_counted() -> None:
    four = machine(("0", "1", "2", "3"))
    check_placeable(deployment(gpus(4, accelerator_type="H100", cpus=999), cluster=SIMULATED), four)
    with pytest.raises(ConfigError, match="simulated_gpus = 4"):
        deployment(gpus(5), cluster={"simulated_gpus": 4})
    with pytest.raises(ConfigError, match="at most 4"):
        check_placeable(deployment(gpus(5), cluster=SIMULATED), four)


async def test_an_apply_with_a_shape_larger_than_any_node_changes_nothing(plane: Plane) -> None:
    await plane.ready(document(gpus(4), cluster=SIMULATED))
    plane.cluster.nodes = NODES
    async with plane.client() as http:
        answer = await http.post("/apply", json=document(gpus(8), cluster=SIMULATED))
    assert answer.status_code == 409
    assert "models[0].shapes.large.gpus" in answer.text
    assert plane.counts() == {SMALL: 1}


async def test_others_give_way_to_a_replica_that_no_node_has_room_for(plane: Plane) -> None:
    await plane.ready(document(gpus(4), cluster=SIMULATED))
    plane.controller.scale("m", 4)
    await plane.ticks()
    plane.cluster.slow = True
    plane.controller.mode("m", "single-large")
    await plane.ticks(3)
    # There is room in sum, as far as the budget says.
    assert plane.cluster.held[SMALL].wanted == 4
    held = plane.cluster.held[LARGE]
    plane.cluster.held[LARGE] = msgspec.structs.replace(held, waits="no node has room", unplaced=1)
    await plane.ticks(3)
    # At least one goes on serving.
    assert plane.cluster.held[SMALL].wanted == 1
