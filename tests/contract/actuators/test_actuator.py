"""The contract of every actuator: what a controller may rely on, wherever the replicas run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest

from policy.errors import ActuatorFailed
from policy.scaling.gpu_fault_replacement import PARTING_S
from policy.scaling.reconcile_steps import LayerKey
from policy.types import ReplicaPhase
from policy.wire.headers import SECRET_HEADER
from serve.actuator.interface import Actuator
from tests.contract.actuators.site import WITHIN_S, Backend, Site
from tests.serve.sim_documents import deployment

KEY = LayerKey("m", "small", 1)


@pytest.fixture
async def site(backend: Backend) -> AsyncIterator[Site[Actuator]]:
    site = Site(
        backend, backend.make, deployment(*backend.models, cluster={"controller": backend.controller})
    )
    yield site
    await site.end()


async def test_scaling_and_a_controller_restart_keep_running_replicas(site: Site[Actuator]) -> None:
    assert await site.actuator.layers() == {}
    await site.deploy(1, KEY)
    first = await site.ready(1, KEY)
    await site.deploy(1, KEY)
    assert (await site.actuator.layers())[KEY].wanted == 1

    await site.actuator.scale(KEY, 2)
    two = await site.ready(2, KEY)
    assert first.items() < two.items()
    await site.deploy(1, KEY)
    assert (await site.actuator.layers())[KEY].wanted == 2

    # A controller that was restarted finds the layer, and changes nothing by reading.
    await site.restart()
    held = (await site.actuator.layers())[KEY]
    assert (held.wanted, held.digest, held.trouble) == (2, "d1", "")
    await site.actuator.scale(KEY, 2)
    assert await site.ready(2, KEY) == two


@pytest.mark.slow
async def test_scaling_to_zero_and_back_and_deleting(site: Site[Actuator]) -> None:
    await site.deploy(1, KEY)
    first = await site.ready(1, KEY)
    await site.actuator.scale(KEY, 0)
    await site.ready(0, KEY)
    assert (await site.actuator.layers())[KEY].wanted == 0

    await site.actuator.scale(KEY, 1)
    second = await site.ready(1, KEY)
    assert not first.keys() & second.keys()

    await site.restart()
    await site.actuator.delete(KEY)
    async with asyncio.timeout(WITHIN_S):
        while KEY in await site.actuator.layers() or site.layer(KEY):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)
    await site.actuator.delete(KEY)
    with pytest.raises(ActuatorFailed):
        await site.actuator.scale(KEY, 1)


@pytest.mark.slow
async def test_layers_are_independent_and_stop_ends_all(site: Site[Actuator]) -> None:
    other = LayerKey("m", "large", 2)
    await site.deploy(1, KEY)
    await site.deploy(1, other)
    await site.ready(1, KEY)
    running = await site.ready(1, other)
    await site.actuator.scale(KEY, 0)
    await site.ready(0, KEY)
    assert await site.ready(1, other) == running
    await site.actuator.stop()
    await site.until(lambda: not site.replicas)
    assert await site.actuator.layers() == {}


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("local", marks=pytest.mark.process),
        pytest.param("ray", marks=[pytest.mark.process, pytest.mark.ray]),
    ],
    indirect=True,
)
async def test_a_draining_replica_finishes_its_streams(site: Site[Actuator]) -> None:
    await site.deploy(1, KEY)
    (replica,) = await site.ready(1, KEY)
    url = site.replicas[replica].url
    body = {"model": "m", "prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {SECRET_HEADER: site.backend.secret}
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
    await site.ready(0, KEY)
    assert site.phases[replica][-2:] == [ReplicaPhase.DRAINING, ReplicaPhase.STOPPED]
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/v1/models")


@pytest.mark.slow
async def test_the_replica_ordered_to_leave_is_the_one_removed(site: Site[Actuator]) -> None:
    """Replacing a failed GPU: one more replica, the failed one leaves, then back to the count."""
    await site.deploy(1, KEY)
    (failed,) = await site.ready(1, KEY)
    await site.actuator.scale(KEY, 2)
    (successor,) = (await site.ready(2, KEY)).keys() - {failed}
    site.leaving[failed] = "XID 79"
    await site.until(lambda: failed not in site.replicas)
    await asyncio.sleep(PARTING_S if site.backend.has_processes else 0.0)
    await site.actuator.scale(KEY, 1)
    (left,) = await site.ready(1, KEY)
    assert site.phases[failed][-2:] == [ReplicaPhase.DRAINING, ReplicaPhase.STOPPED]
    # What is in the place of the one that left stays where places are numbered.
    assert (left == successor) is not site.backend.numbered
    assert site.phases[left][-1] is ReplicaPhase.READY


async def test_a_host_that_hangs_is_killed_and_replaced(site: Site[Actuator]) -> None:
    await site.deploy(2, KEY)
    before = await site.ready(2, KEY)
    victim = min(before)
    if site.backend.has_processes:
        psutil.Process(psutil.Process(before[victim]).ppid()).suspend()
    await site.actuator.kill(KEY, victim)
    await site.actuator.kill(KEY, "no-such-replica")
    site.lose(victim)
    after = await site.ready(2, KEY)
    assert before.keys() - after.keys() == {victim}
    await site.until(lambda: not site.backend.has_processes or not psutil.pid_exists(before[victim]))
