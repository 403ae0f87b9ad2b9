"""Shapes on the nodes of a real cluster: fractions of GPUs, types, custom resources, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.streams import Streams
from tests.e2e.stack import Stack, eventually
from tests.ports import free_ports
from tests.ray_nodes import GPUS_EACH, HEAD, NODE, two_nodes
from tidegate.exit_codes import ExitCode

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1800, func_only=True)]

WITHIN_S = 240.0
OF_THE_SECOND_NODE = ("--resources", '{"accelerator_type:H100": 1, "fast_disk": 2}')
# 1 to 20 s on one GPU of the profile at this speed.
SPEED, LENGTHS = 0.05, (10, 10, 20, 40, 80, 200)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with two_nodes(*OF_THE_SECOND_NODE) as address:
        yield address


@pytest.fixture
def stack(cluster: str, tmp_path: Path) -> Iterator[Stack]:
    """A deployment of one model whose shapes and modes a test sets, on the cluster; not started."""
    (port,) = free_ports(1)
    joined = {"address": cluster, "controller": f"{HEAD}:{port}", "simulated_gpus": 2 * GPUS_EACH}
    stack = Stack(tmp_path, {"models": [], "gateway": {"sse_keepalive_s": 600}})
    stack.document["cluster"] |= joined
    yield stack
    stack.down()


def model(shapes: dict[str, Any], modes: dict[str, Any], **over: Any) -> dict[str, Any]:
    control = {"policy": "static", "mode": {"drain_timeout_s": 60}, "start_timeout_s": 120}
    sim = {"profile": "sim-small", "speed": SPEED}
    return {
        "name": "m", "engine": "sim", "sim": sim, "shapes": shapes, "modes": modes, "control": control,
    } | over  # fmt: skip


def up(stack: Stack, *models: dict[str, Any]) -> None:
    stack.document["models"] = list(models)
    stack.write()
    stack.up()


def test_small_replicas_share_a_gpu_and_shapes_name_types_and_resources(stack: Stack) -> None:
    shapes = {
        "part": {"gpus": 0.25},
        "typed": {"gpus": 1, "accelerator_type": "H100"},
        "disk": {"gpus": 1, "resources": {"fast_disk": 1}},
    }
    modes = {
        "parts": {"shape": "part", "replicas": {"min": 4, "max": 8}},
        "typed": {"shape": "typed", "replicas": 2},
        "disk": {"shape": "disk", "replicas": 2},
    }
    up(stack, model(shapes, modes))
    stack.steady("m", 4)
    with Streams(stack, "m", LENGTHS, clients=8) as streams:
        eventually(lambda: len({stream.replica for stream in streams.ended}) == 4, WITHIN_S)
        assert len({replica.node for replica in stack.replicas("m")}) == 1
        for mode in ("typed", "disk", "parts"):
            assert stack.run("mode", "m", mode, "--wait").returncode == 0
            replicas = stack.replicas("m")
            assert {replica.shape for replica in replicas} == {modes[mode]["shape"]}
            if mode != "parts":
                # The only node that has them.
                assert all(f"//{NODE}:" in replica.url for replica in replicas)
            served = len(streams.ended)
            eventually(lambda served=served: len(streams.ended) > served + 8, WITHIN_S)
        assert stack.run("scale", "m", "8", "--wait").returncode == 0
        assert len({replica.node for replica in stack.replicas("m")}) == 1
    assert not streams.problems


def test_replicas_give_way_to_one_that_no_node_has_room_for(stack: Stack) -> None:
    """Two of three GPUs each leave two GPUs free in sum, but no node with two."""
    wide, pair = GPUS_EACH - 1, 2
    shapes = {
        "wide": {"gpus": wide, "tensor_parallel": wide},
        "pair": {"gpus": pair, "tensor_parallel": pair},
    }
    modes = {
        "wide": {"shape": "wide", "replicas": 2},
        "pair": {"shape": "pair", "replicas": {"min": 1, "max": 4}},
    }
    up(stack, model(shapes, modes))
    stack.steady("m", 2)
    assert len({replica.node for replica in stack.replicas("m")}) == 2
    with Streams(stack, "m", LENGTHS, clients=8) as streams:
        eventually(lambda: len(streams.ended) > 8, WITHIN_S)
        assert stack.run("mode", "m", "pair").returncode == 0
        stack.steady("m", 1)
        assert [replica.shape for replica in stack.replicas("m")] == ["pair"]
        assert stack.run("scale", "m", "4", "--wait").returncode == 0
        served = len(streams.ended)
        eventually(lambda: len(streams.ended) > served + 8, WITHIN_S)
    assert not streams.problems


def test_what_no_node_can_have_is_refused_by_up_and_apply(stack: Stack) -> None:
    good = model({"small": {"gpus": 1}}, {"small": {"shape": "small", "replicas": 1}})
    large = {"gpus": GPUS_EACH + 1, "tensor_parallel": GPUS_EACH + 1}
    refused = [
        (good | {"shapes": {"small": large}}, f"at most {GPUS_EACH}"),
        (good | {"shapes": {"small": {"gpus": 1, "accelerator_type": "L4"}}}, "accelerator_type:L4 0"),
        (good | {"shapes": {"small": {"gpus": 1, "resources": {"tape": 1}}}}, "tape 0"),
        (good | {"engine_args": {"max_num_seq": 8}}, "did you mean 'max_num_seqs'"),
        (good | {"engine_args": {"pipeline_parallel_size": 2}}, "on one node"),
        (good | {"engine_args": {"nnodes": 2}}, "on one node"),
        (good | {"engine_args": {"distributed_executor_backend": "ray"}}, "on one node"),
        (good | {"engine_args": {"data_parallel_size_local": 2}}, "on one node"),
    ]

    def refusals(verb: str) -> list[str]:
        wrong = []
        for spec, expected in refused:
            stack.document["models"] = [spec]
            stack.write()
            done = stack.run(verb, str(stack.file))
            # What only the cluster knows ends the start of the controller.
            codes = {ExitCode.INVALID, ExitCode.FAILED} if verb == "up" else {ExitCode.INVALID}
            if done.returncode not in codes or expected not in done.stderr:
                wrong.append(f"{verb}: {expected}: {done.returncode} {done.stdout} {done.stderr}")
            if verb == "up":
                stack.run("down")
        return wrong

    assert not refusals("up")
    up(stack, good)
    stack.steady("m", 1)
    before = [replica.id for replica in stack.replicas("m")]
    assert not refusals("apply")
    assert [replica.id for replica in stack.replicas("m")] == before
