"""What fails half-way in a shared GPU group is tried again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.errors import ActuatorFailed
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator.shared_gpu_actuator import SharedGpuActuator
from store.state_dir import StateDir
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster
from tests.serve.sim_documents import deployment, sim_model

OLD, NEW = LayerKey("m", "large", 1), LayerKey("m", "large", 2)


class Disk(StateDir):
    """A state directory that may be ``full``."""

    full = False

    def save(self, path: Path, value: Any) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().save(path, value)


class RefusedScale(MemoryActuator):
    """A cluster that refuses new counts while it is ``away``."""

    away = False

    async def scale(self, key: LayerKey, count: int) -> None:
        if self.away:
            raise ActuatorFailed("the cluster does not answer")
        await super().scale(key, count)


async def test_the_host_of_a_group_is_not_expected_to_send_heartbeats(tmp_path: Path) -> None:
    """It would be killed as one that hangs: its engines have names of their own."""
    shapes = {"large": {"gpus": 4, "tensor_parallel": 4}, "small": {"gpus": 1}}
    (model,) = deployment(sim_model(sim={"profile": "sim-small", "wake_s": 1.0}, shapes=shapes)).models
    cluster = MemoryCluster(lambda replica: None)
    actuator = SharedGpuActuator(MemoryActuator(cluster), StateDir(tmp_path).ensure(), lambda key: [])
    await actuator.deploy(OLD, model, None, "old", 1)
    (key,) = cluster.held
    cluster.held[key] = msgspec.structs.replace(cluster.held[key], hosts=("m-large-g1-abc123",))
    assert [layer.hosts for layer in (await actuator.layers()).values()] == [(), ()]


@pytest.mark.parametrize("fault", ["cluster", "disk"])
async def test_a_group_that_could_not_be_given_its_gpus_again_is_not_held(tmp_path: Path, fault: str) -> None:
    shapes = {"large": {"gpus": 4, "tensor_parallel": 4}, "small": {"gpus": 1}}
    (model,) = deployment(sim_model(sim={"profile": "sim-small", "wake_s": 1.0}, shapes=shapes)).models
    cluster, disk = MemoryCluster(lambda replica: None), Disk(tmp_path).ensure()
    inner = RefusedScale(cluster)
    actuator = SharedGpuActuator(inner, disk, lambda key: [])
    await actuator.deploy(OLD, model, None, "old", 1)
    await actuator.scale(OLD, 0)
    # Its GPUs go to another revision, which is then given up.
    await actuator.deploy(NEW, model, None, "new", 1)
    await actuator.scale(NEW, 0)
    assert [cluster.held[key].wanted for key in (OLD, NEW)] == [0, 1]
    inner.away, disk.full = fault == "cluster", fault == "disk"
    with pytest.raises((ActuatorFailed, OSError)):
        await actuator.scale(OLD, 1)
    # The controller compares this with the count that it wants.
    assert (await actuator.layers())[OLD].wanted == 0
    inner.away = disk.full = False
    await actuator.scale(OLD, 1)
    assert (await actuator.layers())[OLD].wanted == 1
    assert [cluster.held[key].wanted for key in (OLD, NEW)] == [1, 0]
