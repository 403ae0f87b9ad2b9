"""A shared GPU group of real engine processes: starts, sleep, wake-ups and failures."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from policy.errors import EngineFailed
from policy.types import Replica, ReplicaPhase, StartPath
from policy.wire.heartbeat import Orders
from serve.host import shared_gpu_host
from serve.host.replica_host import ReplicaHost
from serve.host.shared_gpu_host import SharedGpuHost, host_of
from tests.serve.hosts import WITHIN_S, client, host_spec, prompt
from tests.serve.sim_documents import deployment, sim_model

pytestmark = pytest.mark.process
ASLEEP, READY, DRAINING = ReplicaPhase.ASLEEP, ReplicaPhase.READY, ReplicaPhase.DRAINING
Make = Callable[..., SharedGpuHost]


def model(**over: Any) -> dict[str, Any]:
    """A large shape of two GPUs, and two small ones of one each on them."""
    written: dict[str, Any] = {
        "sim": {"profile": "sim-small", "wake_s": 0.05},
        "shapes": {"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}},
        "modes": {
            "multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 2}},
            "single-large": {"shape": "large"},
        },
    }
    return sim_model(**written | over)


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setattr(shared_gpu_host, "FIRST_ORDERS_S", 0.1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    made: list[SharedGpuHost] = []

    def group(**over: Any) -> SharedGpuHost:
        spec = host_spec(deployment(model(**over)).models[0], tmp_path, "large")
        host = host_of(spec, replica="m-large-g1-x", address="127.0.0.1", node="local")
        assert isinstance(host, SharedGpuHost)
        made.append(host)
        return host

    yield group
    for one in made:
        await one.stop()


def states(group: SharedGpuHost) -> dict[str, ReplicaPhase]:
    return {replica.id: replica.state for replica in snapshots(group)}


def snapshots(group: SharedGpuHost) -> list[Replica]:
    return [host.snapshot() for host in group.replicas]


def of(group: SharedGpuHost, shape: str) -> list[Replica]:
    return [replica for replica in snapshots(group) if replica.shape == shape]


async def until(group: SharedGpuHost, true: Callable[[], object]) -> None:
    """Wait, and check that engines of two shapes are never awake together."""
    async with asyncio.timeout(WITHIN_S):
        while not true():
            awake = {replica.shape for replica in snapshots(group) if replica.state in (READY, DRAINING)}
            assert len(awake) < 2, states(group)
            await asyncio.sleep(0.01)


def serves(group: SharedGpuHost, shape: str, count: int) -> Callable[[], bool]:
    """Whether ``count`` engines of the shape are ready, and all others asleep."""
    return lambda: (
        sum(replica.state is READY for replica in of(group, shape)) == count
        and sum(replica.state is ASLEEP for replica in snapshots(group)) == 3 - count
    )


def test_a_model_without_a_group_has_a_host_of_one_engine(tmp_path: Path) -> None:
    spec = host_spec(deployment(sim_model()).models[0], tmp_path)
    host = host_of(spec, replica="r", address="127.0.0.1", node="local")
    assert isinstance(host, ReplicaHost)
    assert host.replicas == (host,)
    host._log.close()


async def test_every_engine_is_started_and_only_wanted_ones_are_awake(make: Make) -> None:
    group = make()
    group.order({"large": 1, "small": 0})
    assert states(group) == {
        "m-large-g1-x": ReplicaPhase.STARTING, "m-small-g1-x-0": ASLEEP, "m-small-g1-x-1": ASLEEP,
    }  # fmt: skip
    await group.start()
    assert serves(group, "large", 1)()
    # All of them run, those of one shape on their own GPUs, with a measured wake time.
    pids = [replica.pid for replica in snapshots(group)]
    visible_gpus = [psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for pid in pids]
    assert visible_gpus == ["5,7", "5", "7"]
    assert all(replica.wake_s is not None and replica.wake_s >= 0.05 for replica in snapshots(group))
    (large,) = of(group, "large")
    assert (large.start_path, large.incarnation) == (StartPath.CACHED, 0)


async def test_without_orders_all_engines_are_put_to_sleep(make: Make) -> None:
    group = make()
    await group.start()
    assert set(states(group).values()) == {ASLEEP}
    group.replicas[1].obey(Orders(awake={"large": 0, "small": 1}))
    await until(group, serves(group, "small", 1))
    assert of(group, "small")[0].start_path is StartPath.SLEEPING


async def test_a_switch_of_shapes_cuts_no_stream(make: Make) -> None:
    group = make(sim={"profile": "sim-small", "speed": 0.2, "wake_s": 0.05})
    group.order({"large": 1, "small": 0})
    await group.start()
    (large,) = of(group, "large")
    pids = {replica.pid for replica in snapshots(group)}
    async with client(large.url) as http:
        async with http.stream("POST", "/v1/completions", json=prompt(100)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            group.order({"large": 0, "small": 2})
            assert of(group, "large")[0].state is DRAINING
            refused = await http.post("/v1/completions", json=prompt(1))
            while refused.is_success:
                refused = await http.post("/v1/completions", json=prompt(1))
            assert (refused.status_code, refused.headers["x-tidegate-refusal"]) == (503, "draining")
            assert {replica.state for replica in of(group, "small")} == {ReplicaPhase.STARTING}
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        await until(group, serves(group, "small", 2))
        refused = await http.post("/v1/completions", json=prompt(1))
        assert (refused.status_code, refused.headers["x-tidegate-refusal"]) == (503, "starting")
    for replica in of(group, "small"):
        assert replica.start_path is StartPath.SLEEPING
        async with client(replica.url) as http:
            assert (await http.post("/v1/completions", json=prompt(2))).is_success
    group.order({"large": 1, "small": 0})
    await until(group, serves(group, "large", 1))
    # No engine was started for it.
    assert {replica.pid for replica in snapshots(group)} == pids


async def test_a_switch_cancelled_during_the_drain_continues_to_serve(make: Make) -> None:
    group = make(sim={"profile": "sim-small", "speed": 0.05, "wake_s": 0.05})
    group.order({"large": 1, "small": 0})
    await group.start()
    (large,) = of(group, "large")
    async with (
        client(large.url) as http,
        http.stream("POST", "/v1/completions", json=prompt(100)) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        group.order({"large": 0, "small": 2})
        while (await http.post("/v1/completions", json=prompt(1))).is_success:
            pass
        group.order({"large": 1, "small": 0})
        await until(group, lambda: serves(group, "large", 1)() and of(group, "large")[0].load.in_flight == 1)
        assert (await http.get("/v1/models")).is_success
        assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert (await http.post("/v1/completions", json=prompt(1))).is_success


async def test_requests_past_the_drain_timeout_are_cut(make: Make) -> None:
    group = make(
        sim={"profile": "sim-small", "speed": 0.02, "wake_s": 0.0},
        control={"mode": {"drain_timeout_s": 0.3}},
    )
    group.order({"large": 1, "small": 0})
    await group.start()
    (large,) = of(group, "large")
    async with client(large.url) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            async with http.stream("POST", "/v1/completions", json=prompt(1000)) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                group.order({"large": 0, "small": 1})
                async for _ in lines:
                    pass
    await until(group, serves(group, "small", 1))
    assert of(group, "large")[0].pid == large.pid


async def test_a_shape_that_cannot_start_stops_no_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"gpus": 1, "engine_args": {"max_num_seqs": "many"}}
    group = make(shapes={"large": {"gpus": 2, "tensor_parallel": 2}, "small": broken})
    group.order({"large": 1, "small": 0})
    await group.start()
    assert serves(group, "large", 1)()
    assert all("max_num_seqs" in replica.reason for replica in of(group, "small"))
    group.order({"large": 0, "small": 2})
    # It is retried, and fails often enough for the controller to go back.
    await until(group, lambda: all(replica.failures >= 3 for replica in of(group, "small")))
    assert not group.lost.is_set()
    group.order({"large": 1, "small": 0})
    await until(group, serves(group, "large", 1))
    assert not group.lost.is_set()


async def test_a_group_without_an_engine_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_gpu_host, "LOST_S", 2.0)
    group = make(engine_args={"max_num_seqs": "many"})
    group.order({"large": 1, "small": 0})
    with pytest.raises(EngineFailed, match="max_num_seqs"):
        await group.start()
    assert group.lost.is_set()


async def test_an_engine_killed_asleep_is_started_again_when_wanted(make: Make) -> None:
    group = make()
    group.order({"large": 1, "small": 0})
    await group.start()
    before = of(group, "small")
    os.kill(before[0].pid, signal.SIGKILL)
    await until(group, lambda: of(group, "small")[0].incarnation == 1)
    assert serves(group, "large", 1)()
    assert "SIGKILL" in of(group, "small")[0].reason
    group.order({"large": 0, "small": 2})
    await until(group, serves(group, "small", 2))
    assert [replica.pid == was.pid for replica, was in zip(of(group, "small"), before, strict=True)] == [
        False,
        True,
    ]
    assert [replica.start_path for replica in of(group, "small")] == [StartPath.CACHED, StartPath.SLEEPING]


async def test_an_engine_killed_awake_restarts_in_place(make: Make) -> None:
    group = make()
    group.order({"large": 0, "small": 1})
    await group.start()
    first = of(group, "small")[0]
    assert first.state is READY
    os.kill(first.pid, signal.SIGKILL)
    await until(group, lambda: of(group, "small")[0].incarnation == 1 and serves(group, "small", 1)())


async def test_draining_and_stopping_leave_no_process(make: Make) -> None:
    group = make()
    group.order({"large": 0, "small": 1})
    await group.start()
    pids = [replica.pid for replica in snapshots(group)]
    async with asyncio.timeout(WITHIN_S):
        await group.drain()
    await group.stop()
    assert set(states(group).values()) == {ReplicaPhase.STOPPED}
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
