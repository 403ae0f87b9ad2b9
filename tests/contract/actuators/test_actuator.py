"""One suite over every actuator: what a controller may rely on, whatever makes the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from policy.config.deployment import Deployment
from policy.errors import ActuatorFailed
from policy.scaling.replacement import PARTING_S
from policy.scaling.rollout import LayerKey
from policy.types import ReplicaPhase
from policy.wire.headers import SECRET_HEADER
from serve.actuator.interface import Actuator
from serve.actuator.local import LocalActuator
from store.state_dir import StateDir
from tests.contract.actuators.heard import Heard, listening
from tests.ports import free_ports
from tests.ray_head import RayHead
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster
from tests.serve.sim_documents import deployment

KEY = LayerKey("m", "small", 1)
WITHIN_S = 240.0


@dataclass
class Site:
    """An actuator, another over the same state, and what its replicas say, in memory when they ``tell``."""

    actuator: Actuator
    make: Callable[[], Actuator]
    heard: Heard
    secret: str
    deployment: Deployment
    tell: Callable[[], None] = lambda: None

    async def restart(self) -> None:
        await self.actuator.close()
        self.actuator = self.make()

    async def deploy(self, count: int, key: LayerKey = KEY) -> None:
        await self.actuator.deploy(key, self.deployment.models[0], None, "d1", count)

    async def ready(self, count: int, key: LayerKey = KEY) -> dict[str, int]:
        """The process ids by replica, once ``count`` of them are ready and no other is left."""
        await self.until(lambda: len(self.heard.of(key, ReplicaPhase.READY)) == len(self._all(key)) == count)
        return self.heard.of(key, ReplicaPhase.READY)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not true():
                # What a controller does each tick, and what lets the local actuator see ends.
                await self.actuator.layers()
                await asyncio.sleep(0.05)

    async def gone(self, key: LayerKey = KEY) -> None:
        async with asyncio.timeout(WITHIN_S):
            while key in await self.actuator.layers() or self._all(key):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.05)

    def _all(self, key: LayerKey) -> list[str]:
        return [replica for state in ReplicaPhase for replica in self.heard.of(key, state)]


SLOW = [pytest.mark.process]
REAL = [
    pytest.param("local", marks=SLOW),
    pytest.param("ray", marks=[*SLOW, pytest.mark.ray]),
]


@pytest.fixture
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    heard = Heard()
    if request.param == "memory":
        cluster = MemoryCluster(heard.beat)
        yield Site(
            MemoryActuator(cluster),
            lambda: MemoryActuator(cluster),
            heard,
            "",
            deployment(),
            cluster.beat_all,
        )
        return
    make: Callable[[], Actuator]
    if request.param == "ray":
        head: RayHead = request.getfixturevalue("ray_site")
        dashboard, token = request.getfixturevalue("ray_joined")
        from serve.actuator.ray import RayActuator  # noqa: PLC0415 - Ray is loaded by joining

        state, deployed = head.state, head.deployment
        make = lambda: RayActuator(state, deployed.cluster.controller, dashboard, token)  # noqa: E731
    else:
        state, deployed = StateDir(tmp_path).ensure(), _local_deployment()
        make = lambda: LocalActuator(state, deployed.cluster.controller)  # noqa: E731
    port = int(deployed.cluster.controller.rpartition(":")[2])
    with listening(heard.beat, port, state.secret()):
        made = Site(make(), make, heard, state.secret(), deployed)
        yield made
        await made.actuator.stop()
        await made.actuator.close()


def _local_deployment() -> Deployment:
    return deployment(cluster={"controller": f"127.0.0.1:{free_ports(1)[0]}"})


@pytest.mark.parametrize("site", ["memory", *REAL], indirect=True)
async def test_counts_follow_and_what_runs_is_never_restarted(site: Site) -> None:
    assert await site.actuator.layers() == {}
    await site.deploy(1)
    first = await site.ready(1)
    await site.deploy(1)
    assert (await site.actuator.layers())[KEY].wanted == 1

    await site.actuator.scale(KEY, 2)
    two = await site.ready(2)
    assert first.items() < two.items()
    await site.deploy(1)
    assert (await site.actuator.layers())[KEY].wanted == 2

    # A controller that was restarted finds the layer, and changes nothing by looking.
    await site.restart()
    held = (await site.actuator.layers())[KEY]
    assert (held.wanted, held.digest, held.trouble) == (2, "d1", "")
    await site.actuator.scale(KEY, 2)
    assert await site.ready(2) == two


@pytest.mark.parametrize("site", ["memory", *REAL], indirect=True)
async def test_to_zero_and_back_and_deleted(site: Site) -> None:
    await site.deploy(1)
    first = await site.ready(1)
    await site.actuator.scale(KEY, 0)
    await site.ready(0)
    assert (await site.actuator.layers())[KEY].wanted == 0

    await site.actuator.scale(KEY, 1)
    second = await site.ready(1)
    assert not first.keys() & second.keys()

    await site.restart()
    await site.actuator.delete(KEY)
    await site.gone()
    await site.actuator.delete(KEY)
    with pytest.raises(ActuatorFailed):
        await site.actuator.scale(KEY, 1)


@pytest.mark.parametrize("site", ["memory", *REAL], indirect=True)
async def test_layers_are_apart_and_stop_ends_them_all(site: Site) -> None:
    other = LayerKey("m", "large", 2)
    await site.deploy(1)
    await site.deploy(1, other)
    await site.ready(1)
    ours = await site.ready(1, other)
    await site.actuator.scale(KEY, 0)
    await site.ready(0)
    assert await site.ready(1, other) == ours
    await site.actuator.stop()
    await site.until(lambda: not site.heard.replicas)
    assert await site.actuator.layers() == {}


@pytest.mark.parametrize("site", REAL, indirect=True)
async def test_a_stream_in_flight_finishes_while_its_replica_leaves(site: Site) -> None:
    await site.deploy(1)
    (replica,) = await site.ready(1)
    url = site.heard.replicas[replica].url
    body = {"model": "m", "prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {SECRET_HEADER: site.secret}
    lines: list[str] = []
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=WITHIN_S, trust_env=False) as client:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not lines:
                    await site.actuator.scale(KEY, 0)
                if line:
                    lines.append(line)
        assert lines[-1] == "data: [DONE]"
        assert any('"finish_reason":"length"' in line for line in lines)
    await site.ready(0)
    assert site.heard.states[replica][-2:] == [ReplicaPhase.DRAINING, ReplicaPhase.STOPPED]
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/v1/models")


@pytest.mark.parametrize("site", ["memory", *REAL], indirect=True)
async def test_who_is_told_to_leave_makes_way_for_its_successor_and_for_nobody_else(site: Site) -> None:
    """As a failed card is replaced: one more, the one leaves, and once that was seen back to the count."""
    await site.deploy(1)
    (failed,) = await site.ready(1)
    await site.actuator.scale(KEY, 2)
    (successor,) = (await site.ready(2)).keys() - {failed}
    site.heard.leaving[failed] = "XID 79"
    site.tell()
    await site.until(lambda: failed not in site.heard.replicas)
    await asyncio.sleep(PARTING_S if site.secret else 0.0)
    await site.actuator.scale(KEY, 1)
    assert set(await site.ready(1)) == {successor}
    assert site.heard.states[failed][-2:] == [ReplicaPhase.DRAINING, ReplicaPhase.STOPPED]
    assert site.heard.states[successor][-1] is ReplicaPhase.READY
