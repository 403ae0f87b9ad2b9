"""The host of a shared GPU group: one process per engine, which outlives it and is taken over."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from policy.config.deployment import ModelSpec
from serve.host.gpu_group_host import Assignment, GpuGroupHost, Member, host_of, until_unheld
from serve.host.replica_host import ReplicaHost
from tests.serve.host.test_sleeping_engine import model
from tests.serve.hosts import WITHIN_S, host_spec
from tests.serve.sim_documents import deployment, sim_model

pytestmark = pytest.mark.process
Make = Callable[..., GpuGroupHost]


def spec_of(seed: int) -> ModelSpec:
    return deployment(model(sim={"profile": "sim-small", "wake_s": 0.05, "seed": seed})).models[0]


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    made: list[GpuGroupHost] = []

    def group(seed: int = 0) -> GpuGroupHost:
        host = host_of(Assignment(spec=host_spec(spec_of(seed), tmp_path, "large"), replica="m-large-g1-x"))
        assert isinstance(host, GpuGroupHost)
        made.append(host)
        return host

    yield group
    await made[-1].stop()


def group_folder(root: Path) -> Path:
    return next(root.glob("gpus/m-*"))


def members(folder: Path) -> list[Member]:
    return msgspec.json.decode((group_folder(folder) / "members.json").read_bytes(), type=list[Member])


def pids(folder: Path) -> set[int]:
    return {member.pid for member in members(folder)}


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not true():  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.02)


async def abandon(group: GpuGroupHost) -> None:
    """End it as a kill would: its hosts are not told."""
    assert group._supervising is not None
    group._supervising.cancel()
    os.close(group._lease)
    group._log.close()


def test_a_model_without_a_group_has_a_host_of_one_engine(tmp_path: Path) -> None:
    spec = host_spec(deployment(sim_model()).models[0], tmp_path)
    host = host_of(Assignment(spec=spec, replica="r"))
    assert isinstance(host, ReplicaHost)
    assert host.replicas == (host,)
    host._log.close()


async def test_each_engine_has_a_host_that_is_restarted_alone(make: Make, tmp_path: Path) -> None:
    await make().start()
    before = {(member.shape, member.index): member.pid for member in members(tmp_path)}
    assert set(before) == {("large", 0), ("small", 0), ("small", 1)}
    os.kill(before["small", 1], signal.SIGKILL)
    await until(lambda: len(pids(tmp_path) - set(before.values()) - {0}) == 1)
    after = {(member.shape, member.index): member.pid for member in members(tmp_path)}
    assert [place for place in before if after[place] != before[place]] == [("small", 1)]


async def test_a_successor_takes_hosts_over_unless_their_specification_differs(
    make: Make, tmp_path: Path
) -> None:
    first = make()
    await first.start()
    before = pids(tmp_path)
    await abandon(first)
    second = make()
    await second.start()
    assert pids(tmp_path) == before
    assert all(map(psutil.pid_exists, before))
    await abandon(second)
    await make(seed=7).start()
    assert not pids(tmp_path) & before
    assert not any(map(psutil.pid_exists, before))


async def test_draining_and_stopping_leave_no_process(make: Make, tmp_path: Path) -> None:
    group = make()
    await group.start()
    before = pids(tmp_path)
    async with asyncio.timeout(WITHIN_S):
        await group.drain()
    assert not any(map(psutil.pid_exists, before))


async def test_a_group_that_nobody_holds_is_noticed(make: Make, tmp_path: Path) -> None:
    group = make()
    await group.start()
    folder = group_folder(tmp_path)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3.0):
            await until_unheld(folder, 0.5)
    await abandon(group)
    async with asyncio.timeout(WITHIN_S):
        await until_unheld(folder, 1.0)
    await make().start()
