"""The replica host with a real engine process: starts, failures and end."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from policy.engine.step_samples import StepSample
from policy.errors import EngineFailed
from policy.scaling.reconcile_steps import MAX_FAILURES, STABLE_S
from policy.types import Replica, ReplicaLoad, ReplicaPhase, StartPath
from policy.wire.controller_reports import EngineReport
from policy.wire.heartbeat import AdapterUse, HeartbeatResponse, Timeouts
from policy.wire.load_stream import LoadReport
from serve.engine.engine_server import EngineEvent
from serve.host.engine_process import EngineProcess
from serve.host.replica_host import HostSpec, ReplicaHost
from serve.host.weight_verification import ResolvedWeights
from store.model_weights.prepare import WeightsOrigin
from store.os_process import MAX_DESCRIPTORS
from store.progress_report import PreparedWeights, ProgressLine, Report
from store.state_dir import StateDir
from tests.serve.hosts import WITHIN_S, client, host_spec, prompt
from tests.serve.sim_documents import deployment, sim_model

pytestmark = pytest.mark.process
Make = Callable[..., ReplicaHost]


def host_of(spec: HostSpec, folder: Path, replica: str = "r", **options: Any) -> ReplicaHost:
    claims = folder / "cores.json"
    return ReplicaHost(
        spec, replica=replica, address="127.0.0.1", node="local", core_claims=claims, **options
    )


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[ReplicaHost] = []

    def host(
        stable_s: float = STABLE_S, engine: type[EngineProcess] = EngineProcess, **over: Any
    ) -> ReplicaHost:
        spec = host_spec(deployment(sim_model(**over)).models[0], tmp_path)
        made.append(host_of(spec, tmp_path, replica=f"r{len(made)}", stable_s=stable_s, engine=engine))
        return made[-1]

    yield host
    for one in made:
        if one.snapshot().state is not ReplicaPhase.STOPPED:
            await one.stop()


def timeouts(**over: float) -> Timeouts:
    given = {"drain_timeout_s": 60.0, "progress_timeout_s": 60.0, "start_timeout_s": 60.0}
    return Timeouts(**given | over)


async def until(host: ReplicaHost, true: Callable[[Replica], bool]) -> Replica:
    async with asyncio.timeout(WITHIN_S):
        while not true(host.snapshot()):  # noqa: ASYNC110 - loads have no event
            await asyncio.sleep(0.02)
    return host.snapshot()


async def test_host_is_ready_after_the_canary(make: Make) -> None:
    host = make()
    assert host.snapshot().state is ReplicaPhase.STARTING
    await host.start()
    replica = host.snapshot()
    assert replica.state is ReplicaPhase.READY
    assert (replica.id, replica.model, replica.shape, replica.generation) == ("r0", "m", "small", 1)
    assert (replica.incarnation, replica.failures, replica.reason) == (0, 0, "")
    # A start without weights is never cold.
    assert replica.start_path is StartPath.CACHED
    assert replica.start_s is not None
    assert replica.max_model_len
    assert replica.load.bound == 256
    # The canary is no traffic, but it was a real request: the engine stepped for it.
    assert (await until(host, lambda r: r.load.tokens > 0)).load.in_flight == 0
    async with client(host.snapshot().url) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "m"


async def test_an_engine_may_have_more_connections_than_its_parent(make: Make) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    host = make()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        await host.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert psutil.Process(host.snapshot().pid).rlimit(psutil.RLIMIT_NOFILE)[0] == min(hard, MAX_DESCRIPTORS)


async def test_adapter_usage_is_reported_once_and_waiting_counts_with_each_heartbeat(make: Make) -> None:
    host = make()
    line = LoadReport(state=ReplicaPhase.STARTING, load=ReplicaLoad(at=0.0))
    use = AdapterUse(name="a", digest="a" * 64, requests=3, waiting=2)
    host.receive(EngineEvent(line=line, uses=(use,)))
    host.receive(EngineEvent(failed="not of interest"))
    assert [(one.requests, one.waiting) for one in host.take_heartbeat().uses] == [(3, 0), (0, 2)]
    assert [(one.requests, one.waiting) for one in host.take_heartbeat().uses] == [(0, 2)]
    host.receive(EngineEvent(line=line))
    assert host.take_heartbeat().uses == ()


async def test_steps_are_reported_once_and_totals_survive_an_engine_restart(make: Make) -> None:
    host = make()
    step = StepSample(2, 4.0, 600.0, 4.0, 0.1)
    host.receive(EngineEvent(engine=EngineReport(preempted=3, steps=(step,))))
    host.receive(EngineEvent(engine=EngineReport(preempted=5, deferred=1, steps=(step,))))
    both = EngineReport(preempted=5, deferred=1, steps=(StepSample(4, 4.0, 600.0, 4.0, 0.1),))
    assert host.take_heartbeat().engine == both
    assert host.take_heartbeat().engine is None
    # A restarted engine counts from zero.
    for preempted, total in ((0, 5), (2, 7), (0, 7), (1, 8)):
        host.receive(EngineEvent(engine=EngineReport(preempted=preempted)))
        assert host.take_heartbeat().engine == EngineReport(preempted=total)


async def test_the_first_start_is_cold(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    steps: list[ProgressLine] = [
        ProgressLine(step="fetch", message="using"),
        ProgressLine(step="verify", message="is whole"),
    ]

    def prepare(*_: Any, progress: Report, **__: Any) -> PreparedWeights:
        for each in steps:
            progress(each)
        return PreparedWeights(path=tmp_path, digest="d")

    spec = msgspec.structs.replace(
        make().spec, weights=ResolvedWeights(origin=WeightsOrigin.PACKAGE, source="package:p", digest="d")
    )

    async def path() -> StartPath:
        host = host_of(spec, tmp_path, prepare=prepare)
        await host.start()
        await host.stop()
        return host.snapshot().start_path

    assert await path() is StartPath.COLD
    assert await path() is StartPath.CACHED
    # The prepared copy was removed.
    steps.append(ProgressLine(step="extract", message="taking it out"))
    assert await path() is StartPath.COLD


async def test_a_full_disk_delays_neither_a_start_nor_the_obedience_to_orders(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def prepare(*_: Any, progress: Report, **__: Any) -> PreparedWeights:
        progress(ProgressLine(step="verify", message="is whole"))
        return PreparedWeights(path=tmp_path, digest="d")

    spec = msgspec.structs.replace(
        make().spec, weights=ResolvedWeights(origin=WeightsOrigin.PACKAGE, source="package:p", digest="d")
    )
    (StateDir(tmp_path).logs / "replica-full.log").symlink_to("/dev/full")
    host = host_of(spec, tmp_path, replica="full", prepare=prepare)
    for term in (2, 1):
        host.obey(HeartbeatResponse(term=term))
    await host.start()
    assert host.snapshot().failures == 0
    await host.stop()


async def test_a_killed_engine_restarts_in_place_and_reports_it(make: Make) -> None:
    host = make()
    await host.start()
    before = host.snapshot()
    os.kill(before.pid, signal.SIGKILL)
    fallen = await until(host, lambda r: r.state is ReplicaPhase.STARTING)
    assert (fallen.url, fallen.incarnation, fallen.failures) == ("", 1, 1)
    assert "SIGKILL" in fallen.reason
    back = await until(host, lambda r: r.state is ReplicaPhase.READY)
    assert back.id == before.id
    assert back.pid != before.pid
    assert (back.incarnation, back.reason) == (1, "")
    assert not host.lost.is_set()


# With the second every start takes longer than an engine must live to be called stable.
@pytest.mark.parametrize("stable_s", [STABLE_S, 1e-6])
async def test_an_engine_that_fails_repeatedly_is_given_up(make: Make, stable_s: float) -> None:
    host = make(stable_s=stable_s, engine_args={"max_num_seqs": "many"})
    with pytest.raises(EngineFailed) as failed:
        await host.start()
    assert host.lost.is_set()
    replica = host.snapshot()
    assert (replica.state, replica.failures) == (ReplicaPhase.STARTING, MAX_FAILURES)
    assert "max_num_seqs" in str(failed.value)
    assert replica.reason == str(failed.value)
    await host.stop()
    # The last heartbeat of a host that gave up has the reason.
    last = host.snapshot()
    assert (last.state, last.reason, last.failures) == (ReplicaPhase.STOPPED, replica.reason, MAX_FAILURES)


async def test_logs_fall_back_to_other_directories_on_a_node_without_the_heads(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("TIDEGATE_STATE_DIR", raising=False)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        (tmp_path / name).mkdir()
    heads = tmp_path / "file" / "state"
    spec = msgspec.structs.replace(make().spec, state_dir=str(heads))
    await ReplicaHost(spec, replica="a", address="127.0.0.1", node="n").stop()
    assert (tmp_path / "XDG_STATE_HOME" / "tidegate" / "logs" / "replica-a.log").exists()
    # The user's own state directory cannot be created either.
    monkeypatch.setenv("XDG_STATE_HOME", str(heads))
    await ReplicaHost(spec, replica="b", address="127.0.0.1", node="n").stop()
    (log,) = (tmp_path / "XDG_RUNTIME_DIR").glob("tidegate-*/logs/replica-b.log")
    assert log.exists()


async def test_a_stable_engine_resets_the_failure_count(make: Make) -> None:
    host = make(stable_s=0.0)
    await host.start()
    for incarnation in range(1, MAX_FAILURES + 1):
        os.kill(host.snapshot().pid, signal.SIGKILL)
        back = await until(
            host, lambda r, n=incarnation: r.incarnation == n and r.state is ReplicaPhase.READY
        )
        assert back.failures == 1
    assert not host.lost.is_set()


async def test_draining_waits_for_streams_and_refuses_new_requests(make: Make) -> None:
    # The stream lasts longer than the rest of the test.
    host = make(sim={"profile": "sim-small", "speed": 0.05})
    await host.start()
    async with client(host.snapshot().url) as http:
        async with http.stream("POST", "/v1/completions", json=prompt(100)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            draining = asyncio.ensure_future(host.drain())
            await until(host, lambda r: r.state is ReplicaPhase.DRAINING and r.load.in_flight == 1)
            # The host drains at once, its engine after the command.
            async with asyncio.timeout(WITHIN_S):
                while (refused := await http.post("/v1/completions", json=prompt(1))).is_success:
                    pass
            assert (refused.status_code, refused.headers["x-tidegate-refusal"]) == (503, "draining")
            assert not draining.done()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        await draining
    await host.stop()
    assert host.snapshot().state is ReplicaPhase.STOPPED


@pytest.mark.parametrize("ends_by", ["deadline", "order", "death"])
async def test_draining_ends_at_its_timeout_or_with_its_engine(make: Make, ends_by: str) -> None:
    timeout_s = 0.05 if ends_by == "deadline" else 3600.0
    sim = {"profile": "sim-small", "speed": 0.001}
    host = make(sim=sim, control={"mode": {"drain_timeout_s": timeout_s}})
    await host.start()
    async with client(host.snapshot().url) as http, http.stream("POST", "/v1/completions", json=prompt(1000)):
        await until(host, lambda r: r.load.in_flight == 1)
        draining = asyncio.ensure_future(host.drain())
        if ends_by == "death":
            await until(host, lambda r: r.state is ReplicaPhase.DRAINING)
            os.kill(host.snapshot().pid, signal.SIGKILL)
        elif ends_by == "order":
            await until(host, lambda r: r.state is ReplicaPhase.DRAINING)
            host.obey(HeartbeatResponse(term=2))
            # Of a controller that was deposed.
            host.obey(HeartbeatResponse(timeouts=timeouts(drain_timeout_s=0.01), term=1))
            assert host.spec.model.control.mode.drain_timeout_s == timeout_s
            host.obey(HeartbeatResponse(timeouts=timeouts(drain_timeout_s=0.05), term=2))
        async with asyncio.timeout(WITHIN_S):
            await draining
        assert ends_by == "death" or host.snapshot().load.in_flight == 1


@pytest.mark.parametrize("ends_by", ["stream", "deadline"])
async def test_a_host_that_leaves_and_is_stopped_meanwhile_cuts_no_stream_before_its_timeout(
    make: Make, ends_by: str
) -> None:
    host = make(sim={"profile": "sim-small", "speed": 0.05}, control={"mode": {"drain_timeout_s": 3600.0}})
    await host.start()
    async with client(host.snapshot().url) as http:
        async with http.stream("POST", "/v1/completions", json=prompt(100)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            host.obey(HeartbeatResponse(leave="a GPU failed"))
            await until(host, lambda r: r.state is ReplicaPhase.DRAINING and r.load.in_flight == 1)
            # As at a SIGTERM, or when Serve stops the replica.
            stopping = asyncio.ensure_future(host.drain())
            await asyncio.wait([stopping], timeout=0.1)
            assert not stopping.done()
            assert host.snapshot().reason == "a GPU failed"
            if ends_by == "deadline":
                # Both wait for the end of the same drain, which began before the second call.
                host.obey(HeartbeatResponse(timeouts=timeouts(drain_timeout_s=0.1)))
                async with asyncio.timeout(WITHIN_S):
                    await stopping
                    await host.lost.wait()
                assert host.snapshot().load.in_flight == 1
                return
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
    async with asyncio.timeout(WITHIN_S):
        await stopping
        await host.lost.wait()


async def test_a_running_engine_takes_a_new_progress_timeout(make: Make) -> None:
    # One step takes a minute.
    host = make(sim={"profile": "sim-small", "speed": 0.0005})
    starting = asyncio.ensure_future(host.start())
    await until(host, lambda r: r.pid != 0)
    host.obey(HeartbeatResponse(timeouts=timeouts(progress_timeout_s=0.1)))
    failed = await until(host, lambda r: r.failures > 0)
    assert "no engine step" in failed.reason or "the canary" in failed.reason
    starting.cancel()


async def test_a_host_that_is_stopped_while_its_engine_is_being_ended_leaves_no_process(make: Make) -> None:
    ending = asyncio.Event()

    class Ending(EngineProcess):
        async def end(self) -> bool:
            ending.set()
            return await super().end()

    host = make(engine=Ending, sim={"profile": "sim-small", "speed": 0.0005})
    starting = asyncio.ensure_future(host.start())
    await until(host, lambda r: r.pid != 0)
    pid = host.snapshot().pid
    host.obey(HeartbeatResponse(timeouts=timeouts(progress_timeout_s=0.1)))
    await ending.wait()
    await host.stop()
    assert not psutil.pid_exists(pid)
    starting.cancel()


@pytest.mark.parametrize("when", ["starting", "ready"])
async def test_stopping_leaves_no_process(make: Make, when: str) -> None:
    host = make(sim={"profile": "sim-small", "start_s": 60.0 if when == "starting" else 0.0})
    starting = asyncio.ensure_future(host.start())
    await until(host, lambda r: r.pid != 0 and (when == "starting" or r.state is ReplicaPhase.READY))
    pid = host.snapshot().pid
    assert psutil.pid_exists(pid)
    await host.stop()
    assert not psutil.pid_exists(pid)
    await asyncio.gather(starting, return_exceptions=True)
    assert not [p for p in psutil.Process().children() if "serve.engine.main" in p.cmdline()]


async def test_an_engine_that_cannot_be_killed_is_not_ready_and_its_host_is_given_up(make: Make) -> None:
    seen: list[tuple[ReplicaPhase, str]] = []

    class Unkillable(EngineProcess):
        async def end(self) -> bool:
            """As if it were in an uninterruptible call."""
            seen.append((host.snapshot().state, host.snapshot().url))
            await super().end()
            return False

    host = make(engine=Unkillable)
    await host.start()
    os.kill(host.snapshot().pid, signal.SIGKILL)
    async with asyncio.timeout(WITHIN_S):
        await host.lost.wait()
    # Before its end was waited for.
    assert seen == [(ReplicaPhase.STARTING, "")]
    pid = host.snapshot().pid
    reason = f"the engine ended with signal SIGKILL; its process {pid} does not end after SIGKILL"
    assert host.snapshot().reason == reason
    await host.stop()
    assert (host.snapshot().state, host.snapshot().reason) == (ReplicaPhase.STOPPED, reason)
