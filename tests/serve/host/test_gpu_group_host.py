"""The host of a shared GPU group: one process per engine, which outlives it and is taken over."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from policy.config.deployment import ModelSpec
from policy.stats.backoff import Backoff
from serve.host import gpu_group_host
from serve.host.gpu_group_host import (
    GpuGroupHost,
    GroupEngineProcess,
    HostProcessSpec,
    host_of,
    sign_of_life,
    until_unheld,
)
from serve.host.replica_host import ReplicaHost
from serve.host.shared_gpu_locks import open_lock, try_lock
from store.os_process import find
from store.state_dir import StateDir, own_directory
from tests.serve.host.test_time_shared_engine import model
from tests.serve.hosts import WITHIN_S, host_spec
from tests.serve.sim_documents import deployment, sim_model

pytestmark = pytest.mark.process
Make = Callable[..., GpuGroupHost]
StartFailures = Callable[[], AbstractContextManager[None]]


def spec_of(seed: int) -> ModelSpec:
    return deployment(model(sim={"profile": "sim-small", "wake_s": 0.05, "seed": seed})).models[0]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[GpuGroupHost] = []

    def group() -> GpuGroupHost:
        host = host_of(HostProcessSpec(spec=host_spec(spec_of(0), tmp_path, "large"), replica="m-large-g1-x"))
        assert isinstance(host, GpuGroupHost)
        made.append(host)
        return host

    yield group
    for host in made:
        await host.stop()


Holder = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_group_host, "BACKOFF", Backoff(0.01, 0.01))


@pytest.fixture
def start_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartFailures:
    """While it is entered no host can be started, as with too few descriptors, processes or memory."""

    @contextmanager
    def failing() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(tmp_path / "nowhere"))
            yield

    return failing


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    """Starts the host of a group as a process."""
    made: list[subprocess.Popen[bytes]] = []

    def start(seed: int = 0) -> subprocess.Popen[bytes]:
        assignment = HostProcessSpec(spec=host_spec(spec_of(seed), tmp_path, "large"), replica="m-large-g1-x")
        argv = [sys.executable, "-m", "serve.host.process_replica", assignment.replica]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE)
        made.append(process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(assignment) + b"\n")
        process.stdin.close()
        return process

    yield start
    for process in made:
        process.kill()
        process.wait()
    if (group_folder(tmp_path) / "members.json").exists():
        for pid in pids(tmp_path):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def group_folder(root: Path) -> Path:
    return next(root.glob("gpus/m-*"))


def members(folder: Path) -> list[GroupEngineProcess]:
    return msgspec.json.decode(
        (group_folder(folder) / "members.json").read_bytes(), type=list[GroupEngineProcess]
    )


def pids(folder: Path) -> set[int]:
    return {member.pid for member in members(folder)}


def is_held(folder: Path) -> bool:
    lease = open_lock(folder / "held.lock")
    try:
        return not try_lock(lease, shared=True)
    finally:
        os.close(lease)


def complete(folder: Path) -> bool:
    """Whether every engine has a host."""
    written = list(folder.glob("gpus/m-*/members.json"))
    return bool(written) and all(map(find, pids(folder))) and len(pids(folder)) == 3


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not true():  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.02)


async def test_a_model_without_a_group_has_a_host_of_one_engine(tmp_path: Path) -> None:
    spec = host_spec(deployment(sim_model()).models[0], tmp_path)
    host = host_of(HostProcessSpec(spec=spec, replica="r"))
    assert isinstance(host, ReplicaHost)
    assert host.replicas == (host,)
    await host.stop()


async def test_a_host_that_hangs_is_replaced(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_group_host, "HUNG_S", 5.0)
    await make().start()
    before = pids(tmp_path)
    hung = next(member for member in members(tmp_path) if member.shape == "small")
    await until(lambda: sign_of_life(group_folder(tmp_path), hung.replica).exists())
    os.kill(hung.pid, signal.SIGSTOP)
    await until(lambda: len(pids(tmp_path) - before - {0}) == 1)
    assert before - pids(tmp_path) == {hung.pid}


def members_by_engine(folder: Path) -> dict[tuple[str, int], GroupEngineProcess]:
    return {(member.shape, member.index): member for member in members(folder)}


@pytest.mark.usefixtures("quick_backoff")
async def test_an_engine_whose_host_cannot_be_started_is_tried_again_and_interrupts_no_other(
    make: Make, tmp_path: Path, start_failures: StartFailures
) -> None:
    host = make()
    await host.start()
    before = members_by_engine(tmp_path)
    with start_failures():
        os.kill(before["large", 0].pid, signal.SIGKILL)
        await until(lambda: members_by_engine(tmp_path)["large", 0].failures > 2)
        failed = members_by_engine(tmp_path)
    assert failed["large", 0].pid == 0
    assert {**failed, ("large", 0): before["large", 0]} == before
    assert not host.lost.is_set()
    await until(lambda: complete(tmp_path))
    assert len(pids(tmp_path) & {member.pid for member in before.values()}) == 2


@pytest.mark.usefixtures("quick_backoff")
async def test_a_group_whose_first_start_lacks_something_starts_later(
    make: Make, tmp_path: Path, start_failures: StartFailures
) -> None:
    host = make()
    with start_failures():
        await host.start()
        assert pids(tmp_path) == {0}
    await until(lambda: complete(tmp_path))
    assert not host.lost.is_set()


@pytest.mark.usefixtures("quick_backoff")
async def test_a_full_disk_interrupts_no_engine_and_is_written_to_later(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make()
    await host.start()
    before = pids(tmp_path)
    ended = members(tmp_path)[0]
    refused: list[Path] = []

    def full(path: Path, data: bytes, mode: int) -> None:
        refused.append(path)
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(gpu_group_host, "write_atomic", full)
        os.kill(ended.pid, signal.SIGKILL)
        # More than once: it is tried again.
        await until(lambda: len(refused) > 2)
        assert not host.lost.is_set()
        assert pids(tmp_path) == before
    await until(lambda: complete(tmp_path))
    assert before - pids(tmp_path) == {ended.pid}


async def test_a_host_that_fails_in_its_start_ends(holder: Holder, tmp_path: Path) -> None:
    folder = own_directory(own_directory(StateDir(tmp_path).ensure().root / "gpus") / "m-g1-127.0.0.1")
    (folder / "members.json").write_bytes(b"of another version")
    assert await asyncio.to_thread(holder().wait, WITHIN_S) == 1


async def test_a_successor_takes_hosts_over_unless_their_specification_differs(
    holder: Holder, tmp_path: Path
) -> None:
    first = holder()
    await until(lambda: complete(tmp_path))
    before = pids(tmp_path)
    first.kill()
    first.wait()
    # The clock was set meanwhile, and the record of one engine is of a version that kept no key.
    old, *others = members(tmp_path)
    moved = [replace(old, start_key=""), *(replace(each, created=each.created - 3600) for each in others)]
    (group_folder(tmp_path) / "members.json").write_bytes(msgspec.json.encode(moved))
    second = holder()
    await until(lambda: is_held(group_folder(tmp_path)))
    await until(lambda: all(member.start_key for member in members(tmp_path)))
    assert pids(tmp_path) == before
    assert complete(tmp_path)
    second.kill()
    second.wait()
    holder(seed=7)
    await until(lambda: complete(tmp_path) and not pids(tmp_path) & before)
    assert not any(map(find, before))


async def test_sigterm_leaves_no_process(holder: Holder, tmp_path: Path) -> None:
    group = holder()
    await until(lambda: complete(tmp_path))
    before = pids(tmp_path)
    group.terminate()
    await asyncio.to_thread(group.wait, WITHIN_S)
    assert not any(map(find, before))


async def test_a_group_that_nobody_holds_is_noticed(holder: Holder, tmp_path: Path) -> None:
    group = holder()
    await until(lambda: complete(tmp_path))
    unheld = asyncio.create_task(until_unheld(group_folder(tmp_path), 2.0))
    await asyncio.sleep(3.0)  # longer than the time without a holder that counts
    assert not unheld.done()
    group.kill()
    group.wait()
    async with asyncio.timeout(WITHIN_S):
        await unheld
