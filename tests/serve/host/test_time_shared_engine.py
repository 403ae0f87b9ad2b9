"""Engines that share GPUs, in real processes: starts, sleep, wake-ups and failures."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from policy.config.shared_gpus import cards, gpu_group_of
from policy.scaling.gpu_group_commands import GroupEngine, gpu_commands, is_prepared
from policy.scaling.reconcile_steps import MAX_FAILURES
from policy.types import Replica, ReplicaPhase, StartPath
from policy.wire.heartbeat import HeartbeatResponse
from serve.host.replica_host import HostSpec
from serve.host.shared_gpu_locks import GpuLocks
from serve.host.time_shared_engine import EngineSlot, TimeSharedGpuAccess
from tests.serve.hosts import WITHIN_S, client, host_spec, prompt
from tests.serve.sim_documents import deployment, sim_model

pytestmark = pytest.mark.process
ASLEEP, READY, DRAINING = ReplicaPhase.ASLEEP, ReplicaPhase.READY, ReplicaPhase.DRAINING


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


class Group:
    """The engines of one group, and a controller that answers their heartbeats."""

    def __init__(self, spec: HostSpec, folder: Path) -> None:
        plan = gpu_group_of(spec.model)
        assert plan is not None
        self.awake: Mapping[str, int] = dict.fromkeys(plan.engines, 0)
        self.served = False
        self.failed: set[str] = set()
        self.engines = []
        for shape, count in plan.engines.items():
            for index in range(count):
                places = tuple(cards(spec.model.shapes[shape], index))
                slot = EngineSlot(cards=places, visible=tuple("57"[place] for place in places))
                self.engines.append(
                    TimeSharedGpuAccess(
                        host_spec(spec.model, folder, shape), slot, GpuLocks(folder, slot.visible),
                        replica=f"m-{shape}-{index}", address="127.0.0.1", node="local",
                    )
                )  # fmt: skip
        self._answering: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> list[Replica]:
        return [engine.host.snapshot() for engine in self.engines]

    def order(self, awake: Mapping[str, int]) -> None:
        """Set how many engines of each shape are awake, and answer heartbeats with it."""
        self.awake = awake
        self._answer()
        if self._answering is None:
            for engine in self.engines:
                engine.host.begin()
            self._answering = asyncio.create_task(self._keep_answering())

    async def _keep_answering(self) -> None:
        while True:
            self._answer()
            await asyncio.sleep(0.01)

    def _answer(self) -> None:
        replicas = self.replicas
        self.served = self.served or any(replica.state is READY for replica in replicas)
        self.failed |= {replica.id for replica in replicas if replica.failures >= MAX_FAILURES}
        found = gpu_commands([self._seen(each) for each in replicas], self.awake, starting=not self.served)
        for engine in self.engines:
            engine.host.obey(HeartbeatResponse(gpus=found[engine.host.replica.id]))

    def _seen(self, replica: Replica) -> GroupEngine:
        return GroupEngine(
            replica.id, replica.shape, replica.cards, serving=replica.state is READY,
            prepared=is_prepared(replica), failed=replica.id in self.failed,
        )  # fmt: skip

    async def stop(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
            with suppress(asyncio.CancelledError):
                await self._answering
        await asyncio.gather(*(engine.host.stop() for engine in self.engines))


Make = Callable[..., Group]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Group] = []

    def group(**over: Any) -> Group:
        made.append(Group(host_spec(deployment(model(**over)).models[0], tmp_path, "large"), tmp_path))
        return made[-1]

    yield group
    for one in made:
        await one.stop()


def states(group: Group) -> dict[str, ReplicaPhase]:
    return {replica.id: replica.state for replica in snapshots(group)}


def snapshots(group: Group) -> list[Replica]:
    return group.replicas


def of(group: Group, shape: str) -> list[Replica]:
    return [replica for replica in snapshots(group) if replica.shape == shape]


async def until(group: Group, true: Callable[[], object]) -> None:
    """Wait, and check that engines of two shapes are never awake together."""
    async with asyncio.timeout(WITHIN_S):
        while not true():
            awake = {replica.shape for replica in snapshots(group) if replica.state in (READY, DRAINING)}
            assert len(awake) < 2, states(group)
            await asyncio.sleep(0.01)


def serves(group: Group, shape: str, count: int) -> Callable[[], bool]:
    """Whether ``count`` engines of the shape are ready, and all others asleep."""
    return lambda: (
        sum(replica.state is READY for replica in of(group, shape)) == count
        and sum(replica.state is ASLEEP for replica in snapshots(group)) == 3 - count
    )


async def up(group: Group, **awake: int) -> None:
    ((shape, count),) = awake.items()
    group.order({"large": 0, "small": 0} | awake)
    await until(group, serves(group, shape, count))


async def test_every_engine_is_started_and_only_wanted_ones_are_awake(make: Make) -> None:
    group = make()
    group.order({"large": 1, "small": 0})
    assert states(group) == {
        "m-large-0": ReplicaPhase.STARTING, "m-small-0": ASLEEP, "m-small-1": ASLEEP,
    }  # fmt: skip
    await up(group, large=1)
    # All of them run, those of one shape on their own GPUs, with a measured wake time.
    pids = [replica.pid for replica in snapshots(group)]
    visible_gpus = [psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for pid in pids]
    assert visible_gpus == ["5,7", "5", "7"]
    assert all(replica.wake_s is not None and replica.wake_s >= 0.05 for replica in snapshots(group))
    (large,) = of(group, "large")
    assert (large.start_path, large.incarnation) == (StartPath.CACHED, 0)


async def test_a_switch_of_shapes_cuts_no_stream(make: Make) -> None:
    group = make(sim={"profile": "sim-small", "speed": 0.2, "wake_s": 0.05})
    await up(group, large=1)
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
    await up(group, large=1)
    (large,) = of(group, "large")
    async with client(large.url) as http, http.stream("POST", "/v1/completions", json=prompt(100)) as answer:
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
        sim={"profile": "sim-small", "speed": 0.02, "wake_s": 0.0}, control={"mode": {"drain_timeout_s": 0.3}}
    )
    await up(group, large=1)
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


async def test_a_shape_that_cannot_start_stops_no_other(make: Make) -> None:
    broken = {"gpus": 1, "engine_args": {"max_num_seqs": "many"}}
    group = make(shapes={"large": {"gpus": 2, "tensor_parallel": 2}, "small": broken})
    await up(group, large=1)
    assert all("max_num_seqs" in engine.host.replica.reason for engine in group.engines[1:])
    # Their hosts are to be replaced.
    assert [engine.host.lost.is_set() for engine in group.engines] == [False, True, True]


async def test_an_engine_killed_asleep_is_started_again_when_wanted(make: Make) -> None:
    group = make()
    await up(group, large=1)
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
    await up(group, small=1)
    (served,) = (replica for replica in group.replicas if replica.state is READY)

    def restarted() -> bool:
        now = next(replica for replica in group.replicas if replica.id == served.id)
        return now.incarnation == 1 and serves(group, "small", 1)()

    os.kill(served.pid, signal.SIGKILL)
    await until(group, restarted)
