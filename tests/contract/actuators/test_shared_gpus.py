"""Layers of a shared GPU group over every actuator: the contract is that of any other layer."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import psutil
import pytest

from policy.config.deployment import Deployment
from policy.config.engine_revision import digest
from policy.errors import ActuatorFailed
from policy.scaling.reconcile_steps import LayerKey
from policy.types import Replica, ReplicaPhase
from policy.wire.heartbeat import HeartbeatResponse
from serve.actuator.interface import ActuatorLayer
from serve.actuator.shared_gpu_actuator import SharedGpuActuator
from serve.host.shared_gpu_locks import open_lock, try_lock
from store.state_dir import StateDir
from tests.contract.actuators.site import Backend, Site
from tests.serve.memory_actuator import MemoryActuator
from tests.serve.sim_documents import deployment, sim_model

LARGE, SMALL = LayerKey("m", "large", 1), LayerKey("m", "small", 1)
READY, ASLEEP = ReplicaPhase.READY, ReplicaPhase.ASLEEP
IN_MEMORY = pytest.mark.parametrize("backend", ["memory"], indirect=True)


def sharing(controller: str, seed: int = 0) -> Deployment:
    model = sim_model(
        sim={"profile": "sim-small", "wake_s": 0.05, "seed": seed},
        shapes={"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}},
        modes={
            "single-large": {"shape": "large", "replicas": 1},
            "multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 2}},
        },
    )
    return deployment(model, cluster={"controller": controller})


class GroupSite(Site[SharedGpuActuator]):
    """A site whose heartbeats are answered with the engines that are to be awake."""

    def orders(self, replica: Replica) -> HeartbeatResponse:
        return HeartbeatResponse(gpus=self.actuator.order(replica))

    def of(self, key: LayerKey) -> list[Replica]:
        return [replica for replica in list(self.replicas.values()) if LayerKey.of(replica) == key]

    def digest(self, key: LayerKey) -> str:
        return digest(self.deployment.models[0], key.shape) + "weights"

    async def deploy(self, count: int, key: LayerKey, digest: str = "") -> None:
        await super().deploy(count, key, digest or self.digest(key))

    async def awake(self, large: int, small: int) -> set[int]:
        """The process ids of the group's three engines, once this many are awake and the others asleep."""
        await self.until(
            lambda: (
                (len(self.layer(LARGE, READY)), len(self.layer(SMALL, READY))) == (large, small)
                and len(self.layer(LARGE, ASLEEP)) + len(self.layer(SMALL, ASLEEP)) == 3 - large - small
                and all(replica.pid for replica in self.replicas.values())
            )
        )
        return {replica.pid for replica in self.replicas.values()}


@pytest.fixture
async def site(backend: Backend, tmp_path: Path) -> AsyncIterator[GroupSite]:
    if backend.models:
        pytest.skip("engines of others share no GPUs")
    # The group's state must not outlive the test; that of a Ray backend does.
    state = StateDir(tmp_path / "group").ensure()
    site = GroupSite(
        backend,
        lambda: SharedGpuActuator(backend.make(), state, lambda key: site.of(key)),  # noqa: PLW0108 - it is set later
        sharing(backend.controller),
    )
    yield site
    await site.end()


def summary(layers: Mapping[LayerKey, ActuatorLayer]) -> dict[LayerKey, tuple[int, str, bool]]:
    return {key: (held.wanted, held.digest, held.sleeps) for key, held in layers.items()}


async def test_deploying_one_layer_creates_both_and_scaling_wakes_and_sleeps(site: GroupSite) -> None:
    assert await site.actuator.layers() == {}
    await site.deploy(1, LARGE)
    both = {LARGE: (1, site.digest(LARGE), True), SMALL: (0, site.digest(SMALL), True)}
    engines = await site.awake(1, 0)
    assert summary(await site.actuator.layers()) == both
    # Deploying an existing layer changes nothing.
    await site.deploy(1, LARGE)
    await site.deploy(2, SMALL)
    assert summary(await site.actuator.layers()) == both

    await site.actuator.scale(LARGE, 0)
    await site.awake(0, 0)
    for count in (2, 1):
        await site.actuator.scale(SMALL, count)
        assert await site.awake(0, count) == engines


async def test_a_restarted_actuator_continues_with_the_same_state(site: GroupSite) -> None:
    await site.deploy(2, SMALL)
    engines = await site.awake(0, 2)
    before = await site.actuator.layers()
    await site.restart()
    assert await site.actuator.layers() == before
    await site.actuator.scale(SMALL, 0)
    # Killed before any host received the order.
    await site.restart()
    assert await site.awake(0, 0) == engines
    await site.actuator.scale(LARGE, 1)
    assert await site.awake(1, 0) == engines


async def test_the_group_ends_with_its_last_layer(site: GroupSite) -> None:
    await site.deploy(1, LARGE)
    await site.awake(1, 0)
    await site.actuator.delete(SMALL)
    assert set(await site.actuator.layers()) == {LARGE}
    with pytest.raises(ActuatorFailed):
        await site.actuator.scale(SMALL, 1)
    await site.deploy(1, SMALL)
    assert set(await site.actuator.layers()) == {LARGE, SMALL}
    await site.actuator.scale(SMALL, 0)
    await site.actuator.delete(SMALL)
    await site.actuator.delete(LARGE)
    await site.until(lambda: not site.replicas)
    assert await site.actuator.layers() == {}
    await site.actuator.delete(LARGE)
    with pytest.raises(ActuatorFailed):
        await site.actuator.scale(LARGE, 1)


async def test_generations_use_the_gpus_of_a_group_one_after_another(site: GroupSite) -> None:
    await site.deploy(1, LARGE)
    old = await site.awake(1, 0)
    await site.actuator.scale(LARGE, 0)
    await site.awake(0, 0)
    new = LayerKey("m", "large", 2)
    site.deployment = sharing(site.backend.controller, seed=7)
    await site.deploy(1, new)
    await site.until(lambda: not site.layer(LARGE, ASLEEP) and len(site.layer(new, READY)) == 1)
    held = await site.actuator.layers()
    assert (held[LARGE].sleeps, held[new].sleeps) == (False, True)
    await site.actuator.scale(new, 0)
    await site.actuator.scale(LARGE, 1)
    await site.until(lambda: len(site.layer(LARGE, READY)) == 1 and not site.layer(new, ASLEEP))
    assert not old & set(site.layer(LARGE, READY).values())


@pytest.mark.parametrize(
    "backend",
    ["memory", pytest.param("local", marks=[pytest.mark.process, pytest.mark.long])],
    indirect=True,
)
async def test_a_ladder_of_modes_is_climbed_on_the_same_gpus(site: GroupSite) -> None:
    sizes = {"tp8": 8, "tp4": 4, "tp1": 1}
    model = sim_model(
        sim={"profile": "sim-small", "wake_s": 0.05},
        shapes={name: {"gpus": gpus, "tensor_parallel": gpus} for name, gpus in sizes.items()},
        modes={name: {"shape": name, "replicas": {"min": 1, "max": 8 // n}} for name, n in sizes.items()},
    )
    site.deployment = deployment(model, cluster={"controller": site.backend.controller})
    layers = {name: LayerKey("m", name, 1) for name in sizes}

    async def serve(wanted: dict[str, int]) -> None:
        for name, key in layers.items():
            await site.actuator.scale(key, wanted.get(name, 0))
        await site.until(
            lambda: (
                [len(site.layer(key, READY)) for key in layers.values()] == [wanted.get(n, 0) for n in sizes]
                and len(site.layer(layers["tp8"], ASLEEP)) == 1 - wanted.get("tp8", 0)
            )
        )
        used = [card for each in site.replicas.values() if each.state is READY for card in each.cards]
        assert sorted(used) == list(range(8))

    await site.deploy(1, layers["tp8"])
    await serve({"tp8": 1})
    engines = {replica.pid for replica in site.replicas.values()}
    for wanted in ({"tp4": 2}, {"tp1": 8}, {"tp4": 1, "tp1": 4}, {"tp4": 2}, {"tp8": 1}):
        await serve(wanted)
    assert {replica.pid for replica in site.replicas.values()} == engines


def held(engine: int) -> bool:
    """Whether some process holds the group of this engine process."""
    host = psutil.Process(engine).parent()
    assert host is not None
    (root,) = {Path(file.path).parents[1] for file in host.open_files() if "/locks-" in file.path}
    # Folders of groups that ended stay, unlocked. The host shows its life in the one of its own group.
    (sign,) = root.glob(f"*/{host.cmdline()[-1]}.alive")
    lease = open_lock(sign.with_name("held.lock"))
    try:
        return not try_lock(lease, shared=True)
    finally:
        os.close(lease)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("local", marks=pytest.mark.process),
        pytest.param("ray", marks=[pytest.mark.process, pytest.mark.ray]),
    ],
    indirect=True,
)
async def test_a_kill_ends_at_most_one_engine(site: GroupSite) -> None:
    await site.deploy(2, SMALL)
    engines = await site.awake(0, 2)
    (replica, first), (_, other) = site.layer(SMALL, READY).items()
    (large,) = site.layer(LARGE).values()
    host = psutil.Process(first).parent()
    assert host is not None
    holder = host.parent()
    assert holder is not None
    host.kill()
    host.wait()
    site.lose(replica)
    after = await site.awake(0, 2)
    assert {other, large} < after
    holder.kill()
    await site.until(lambda: not held(other))
    await site.until(lambda: held(other))
    assert await site.awake(0, 2) == after
    await site.actuator.scale(SMALL, 0)
    await site.actuator.scale(LARGE, 1)
    assert await site.awake(1, 0) == after
    assert first not in after and first in engines


@IN_MEMORY
async def test_a_kill_between_steps_leaves_no_group(site: GroupSite, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise ActuatorFailed("killed here")

    # Before the group was created: the next call creates it.
    with monkeypatch.context() as patch:
        patch.setattr(MemoryActuator, "deploy", refuse)
        with pytest.raises(ActuatorFailed):
            await site.deploy(1, LARGE)
    await site.restart()
    assert await site.actuator.layers() == {}
    await site.deploy(1, SMALL)
    await site.awake(0, 1)
    # Before it was deleted: the next read deletes it.
    await site.actuator.delete(LARGE)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryActuator, "delete", refuse)
        with pytest.raises(ActuatorFailed):
            await site.actuator.delete(SMALL)
    await site.restart()
    assert await site.actuator.layers() == {}
    assert site.backend.cluster is not None
    assert site.backend.cluster.held == {}
    assert site.replicas == {}


@IN_MEMORY
async def test_a_model_without_a_shared_group_uses_the_inner_actuator(site: GroupSite) -> None:
    site.deployment = deployment(sim_model("p"))
    key = LayerKey("p", "small", 1)
    await site.deploy(2, key, "d")
    assert summary(await site.actuator.layers()) == {key: (2, "d", False)}
    await site.actuator.scale(key, 1)
    assert summary(await site.actuator.layers()) == {key: (1, "d", False)}
    (replica,) = site.replicas.values()
    assert site.actuator.order(replica) is None
    await site.actuator.delete(key)
    assert await site.actuator.layers() == {}


@IN_MEMORY
async def test_a_start_failure_is_reported_for_every_layer_of_the_group(site: GroupSite) -> None:
    await site.deploy(1, LARGE)
    assert site.backend.cluster is not None
    held = site.backend.cluster.held[LARGE]
    site.backend.cluster.held[LARGE] = msgspec.structs.replace(held, trouble="no GPUs", retry_at=5.0)
    layers = await site.actuator.layers()
    assert [(held.trouble, held.retry_at) for held in layers.values()] == [("no GPUs", 5.0)] * 2
