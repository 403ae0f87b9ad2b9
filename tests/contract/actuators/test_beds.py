"""Layers of a bed over every actuator: what a controller may rely on is what it may of any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from policy.config.deployment import Deployment
from policy.config.model_revision import digest
from policy.errors import ActuatorFailed
from policy.scaling.rollout import LayerKey
from policy.types import Replica, ReplicaPhase
from policy.wire.heartbeat import Orders
from serve.actuator.interface import Held
from serve.actuator.local import LocalActuator
from serve.actuator.shared_gpus import SharedGpuActuator
from store.state_dir import StateDir
from tests.contract.actuators.heard import Heard, listening
from tests.ports import free_ports
from tests.ray_head import RayHead
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster
from tests.serve.sim_documents import deployment, sim_model

LARGE, SMALL = LayerKey("m", "large", 1), LayerKey("m", "small", 1)
READY, ASLEEP = ReplicaPhase.READY, ReplicaPhase.ASLEEP
WITHIN_S = 240.0


def written(controller: str = "127.0.0.1:1", seed: int = 0) -> Deployment:
    model = sim_model(
        sim={"profile": "sim-small", "wake_s": 0.05, "seed": seed},
        shapes={"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}},
        modes={
            "single-large": {"shape": "large", "replicas": 1},
            "multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 2}},
        },
    )
    return deployment(model, cluster={"controller": controller})


@dataclass
class Site:
    """Beds over an actuator that may be made anew, and what their engines say."""

    make: Callable[[], SharedGpuActuator]
    deployment: Deployment
    cluster: MemoryCluster | None = None
    heard: Heard = field(default_factory=Heard)
    beds: SharedGpuActuator = field(init=False)

    def beat(self, replica: Replica) -> Orders:
        self.heard.beat(replica)
        return Orders(awake=self.beds.awake(replica))

    async def restart(self) -> None:
        await self.beds.close()
        self.beds = self.make()

    def digest(self, key: LayerKey) -> str:
        return digest(self.deployment.models[0], key.shape) + "weights"

    async def deploy(self, count: int, key: LayerKey) -> None:
        await self.beds.deploy(key, self.deployment.models[0], None, self.digest(key), count)

    def of(self, key: LayerKey, state: ReplicaPhase) -> dict[str, int]:
        return self.heard.of(key, state)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not true():
                await self.beds.layers()
                if self.cluster is not None:
                    self.cluster.beat_all()
                await asyncio.sleep(0 if self.cluster is not None else 0.05)

    async def awake(self, large: int, small: int) -> set[int]:
        await self.until(
            lambda: (
                (len(self.of(LARGE, READY)), len(self.of(SMALL, READY))) == (large, small)
                and len(self.of(LARGE, ASLEEP)) + len(self.of(SMALL, ASLEEP)) == 3 - large - small
            )
        )
        return {replica.pid for replica in self.heard.replicas.values()}


@pytest.fixture
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    state = StateDir(tmp_path).ensure()
    if request.param == "memory":
        cluster = MemoryCluster(lambda replica: made.beat(replica))  # noqa: PLW0108 - it is made below
        made = Site(lambda: SharedGpuActuator(MemoryActuator(cluster), state), written(), cluster)
        made.beds = made.make()
        yield made
        return
    if request.param == "ray":
        head: RayHead = request.getfixturevalue("ray_site")
        dashboard, token = request.getfixturevalue("ray_joined")
        from serve.actuator.ray import RayActuator  # noqa: PLC0415 - Ray is loaded by joining

        address, secret = head.deployment.cluster.controller, head.state.secret()
        # The state directory is the test's own: what a bed is told outlives no test.
        made = Site(
            lambda: SharedGpuActuator(RayActuator(head.state, address, dashboard, token), state),
            written(address),
        )
    else:
        address, secret = f"127.0.0.1:{free_ports(1)[0]}", state.secret()
        made = Site(lambda: SharedGpuActuator(LocalActuator(state, address), state), written(address))
    made.beds = made.make()
    port = int(address.rpartition(":")[2])
    with listening(made.beat, port, secret):
        yield made
        await made.beds.stop()
        await made.beds.close()


EVERY = pytest.mark.parametrize(
    "site",
    [
        "memory",
        pytest.param("local", marks=[pytest.mark.process]),
        pytest.param("ray", marks=[pytest.mark.process, pytest.mark.ray]),
    ],
    indirect=True,
)


def said(layers: Mapping[LayerKey, Held]) -> dict[LayerKey, tuple[int, str, bool]]:
    return {key: (held.wanted, held.digest, held.sleeps) for key, held in layers.items()}


@EVERY
async def test_both_layers_are_there_once_one_is_deployed_and_counts_wake_and_put_to_sleep(
    site: Site,
) -> None:
    assert await site.beds.layers() == {}
    await site.deploy(1, LARGE)
    both = {LARGE: (1, site.digest(LARGE), True), SMALL: (0, site.digest(SMALL), True)}
    engines = await site.awake(1, 0)
    assert said(await site.beds.layers()) == both
    await site.deploy(1, LARGE)
    await site.deploy(2, SMALL)
    # It is there already, as one that was deployed before.
    assert said(await site.beds.layers()) == both

    await site.beds.scale(LARGE, 0)
    await site.awake(0, 0)
    for count in (2, 1):
        await site.beds.scale(SMALL, count)
        assert await site.awake(0, count) == engines


@EVERY
async def test_another_actuator_over_the_same_state_goes_on(site: Site) -> None:
    await site.deploy(2, SMALL)
    engines = await site.awake(0, 2)
    before = await site.beds.layers()
    await site.restart()
    assert await site.beds.layers() == before
    await site.beds.scale(SMALL, 0)
    # Killed before anybody was told.
    await site.restart()
    assert await site.awake(0, 0) == engines
    await site.beds.scale(LARGE, 1)
    assert await site.awake(1, 0) == engines


@EVERY
async def test_the_bed_ends_with_its_last_layer(site: Site) -> None:
    await site.deploy(1, LARGE)
    await site.awake(1, 0)
    await site.beds.delete(SMALL)
    assert set(await site.beds.layers()) == {LARGE}
    with pytest.raises(ActuatorFailed):
        await site.beds.scale(SMALL, 1)
    await site.deploy(1, SMALL)
    assert set(await site.beds.layers()) == {LARGE, SMALL}
    await site.beds.scale(SMALL, 0)
    await site.beds.delete(SMALL)
    await site.beds.delete(LARGE)
    await site.until(lambda: not site.heard.replicas)
    assert await site.beds.layers() == {}
    await site.beds.delete(LARGE)
    with pytest.raises(ActuatorFailed):
        await site.beds.scale(LARGE, 1)


@EVERY
async def test_an_idle_bed_gives_its_gpus_to_another_generation_and_takes_them_back(site: Site) -> None:
    await site.deploy(1, LARGE)
    old = await site.awake(1, 0)
    await site.beds.scale(LARGE, 0)
    await site.awake(0, 0)
    new = LayerKey("m", "large", 2)
    site.deployment = written(site.deployment.cluster.controller, seed=7)
    await site.beds.deploy(new, site.deployment.models[0], None, site.digest(new), 1)
    await site.until(lambda: not site.of(LARGE, ASLEEP) and len(site.of(new, READY)) == 1)
    held = await site.beds.layers()
    assert (held[LARGE].sleeps, held[new].sleeps) == (False, True)
    await site.beds.scale(new, 0)
    await site.beds.scale(LARGE, 1)
    await site.until(lambda: len(site.of(LARGE, READY)) == 1 and not site.of(new, ASLEEP))
    assert not old & set(site.of(LARGE, READY).values())


@pytest.mark.parametrize("site", ["memory"], indirect=True)
async def test_a_kill_between_two_steps_leaves_nothing_behind(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise ActuatorFailed("killed here")

    # Before the bed was made: it is made by the next call.
    with monkeypatch.context() as patch:
        patch.setattr(MemoryActuator, "deploy", refuse)
        with pytest.raises(ActuatorFailed):
            await site.deploy(1, LARGE)
    await site.restart()
    assert await site.beds.layers() == {}
    await site.deploy(1, SMALL)
    await site.awake(0, 1)
    # Before it was deleted: it is deleted by the next look.
    await site.beds.delete(LARGE)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryActuator, "delete", refuse)
        with pytest.raises(ActuatorFailed):
            await site.beds.delete(SMALL)
    await site.restart()
    assert await site.beds.layers() == {}
    assert site.cluster is not None
    assert site.cluster.held == {}
    assert site.heard.replicas == {}


@pytest.mark.parametrize("site", ["memory"], indirect=True)
async def test_what_has_no_bed_passes_through(site: Site) -> None:
    plain = deployment(sim_model("p")).models[0]
    key = LayerKey("p", "small", 1)
    await site.beds.deploy(key, plain, None, "d", 2)
    assert said(await site.beds.layers()) == {key: (2, "d", False)}
    await site.beds.scale(key, 1)
    assert said(await site.beds.layers()) == {key: (1, "d", False)}
    (replica,) = site.heard.replicas.values()
    assert site.beds.awake(replica) is None
    await site.beds.delete(key)
    assert await site.beds.layers() == {}


@pytest.mark.parametrize("site", ["memory"], indirect=True)
async def test_trouble_beneath_is_trouble_of_every_layer(site: Site) -> None:
    await site.deploy(1, LARGE)
    assert site.cluster is not None
    held = site.cluster.held[LARGE]
    site.cluster.held[LARGE] = msgspec.structs.replace(held, trouble="no GPUs", retry_at=5.0)
    layers = await site.beds.layers()
    assert [(held.trouble, held.retry_at) for held in layers.values()] == [("no GPUs", 5.0)] * 2
