"""GPUs of hosts without Ray: which ones a host gets, until when, and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from policy.config.deployment import Cluster, ModelSpec
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator.gpu_cards import GpuGrant, cards_of_machine, choose
from serve.actuator.local import LocalActuator
from store.state_dir import StateDir
from tests.serve.sim_documents import deployment, sim_model

FOUR = ("0", "1", "2", "3")
CLUSTER = Cluster(controller="127.0.0.1:1", simulated_gpus=4)


@pytest.mark.parametrize(
    ("gpus", "held", "chosen"),
    [
        (1, [], ("0",)),
        (1, [GpuGrant(cards=("0", "2"))], ("1",)),
        # Neighbours first, then any.
        (2, [GpuGrant(cards=("1",))], ("2", "3")),
        (2, [GpuGrant(cards=("1",)), GpuGrant(cards=("2",))], ("0", "3")),
        (4, [GpuGrant(cards=("1",))], None),
        # A fraction goes where others are, as long as there is room.
        (0.5, [GpuGrant(cards=("0",)), GpuGrant(cards=("2",), share=0.5)], ("2",)),
        (0.6, [GpuGrant(cards=("0",)), GpuGrant(cards=("2",), share=0.5)], ("1",)),
        (0.1, [GpuGrant(cards=("3",), share=0.1)] * 9, ("3",)),
        (0.5, [GpuGrant(cards=FOUR)], None),
        (1, [GpuGrant(cards=FOUR, share=0.1)], None),
    ],
)
def test_a_host_gets_free_gpus(gpus: float, held: list[GpuGrant], chosen: tuple[str, ...] | None) -> None:
    found = choose(gpus, FOUR, held)
    assert (found and found.cards) == chosen
    assert found is None or found.share == min(1, gpus)


def test_the_gpus_of_a_machine_are_those_that_the_controller_sees() -> None:
    assert cards_of_machine(CLUSTER, {"CUDA_VISIBLE_DEVICES": "9"}) == FOUR
    assert cards_of_machine(Cluster(), {"CUDA_VISIBLE_DEVICES": "2, GPU-7"}) == ("2", "GPU-7")
    assert cards_of_machine(Cluster(), {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert cards_of_machine(Cluster(), {"CUDA_VISIBLE_DEVICES": "1,-1,0"}) == ("1",)


@pytest.fixture
async def actuator(tmp_path: Path) -> AsyncIterator[LocalActuator]:
    program = tmp_path / "host"
    program.write_text(f"#!/bin/sh\necho $CUDA_VISIBLE_DEVICES >> {tmp_path}/seen\nexec sleep 600\n")
    program.chmod(0o755)
    made = LocalActuator(
        StateDir(tmp_path).ensure(), CLUSTER, cards_of_machine(CLUSTER, {}), interpreter=str(program)
    )
    yield made
    await made.stop()
    await made.close()


def spec(**small: Any) -> ModelSpec:
    shapes = {"small": {"gpus": 1, **small}, "large": {"gpus": 4, "tensor_parallel": 4}}
    return deployment(sim_model(shapes=shapes)).models[0]


async def seen(folder: Path, count: int) -> list[str]:
    """The GPUs that so many hosts were shown."""
    file = folder / "seen"
    while not file.exists() or len(file.read_text().splitlines()) < count:  # noqa: ASYNC110 - a shell writes it
        await asyncio.sleep(0.01)
    return sorted(file.read_text().splitlines())


SMALL, LARGE = LayerKey("m", "small", 1), LayerKey("m", "large", 1)


@pytest.mark.process
async def test_every_host_has_gpus_of_its_own_until_its_process_has_ended(
    actuator: LocalActuator, tmp_path: Path
) -> None:
    await actuator.deploy(SMALL, spec(), None, "d", 2)
    assert await seen(tmp_path, 2) == ["0", "1"]
    await actuator.deploy(LARGE, spec(), None, "d", 1)
    held = await actuator.layers()
    assert (held[SMALL].waits, held[SMALL].unplaced) == ("", 0)
    assert "1 of large wait: 4 GPUs each are not free of the 4 GPUs" in held[LARGE].waits
    assert held[LARGE].unplaced == 1
    # Another controller of the same state knows which GPUs are taken.
    again = LocalActuator(StateDir(tmp_path), CLUSTER, FOUR)
    assert (await again.layers())[LARGE].waits
    await again.close()
    await actuator.scale(SMALL, 0)
    while (await actuator.layers())[LARGE].waits:  # noqa: ASYNC110 - a process ends
        await asyncio.sleep(0.01)
    assert "0,1,2,3" in await seen(tmp_path, 3)


@pytest.mark.process
async def test_replicas_with_a_fraction_share_a_gpu(actuator: LocalActuator, tmp_path: Path) -> None:
    await actuator.deploy(SMALL, spec(gpus=0.4), None, "d", 3)
    assert await seen(tmp_path, 3) == ["0", "0", "1"]
