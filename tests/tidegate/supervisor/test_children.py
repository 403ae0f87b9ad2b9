"""Child processes are started again, whatever a start lacks, and stopped without an error."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from policy.stats.backoff import Backoff
from store.state_dir import StateDir
from tidegate.supervisor import children
from tidegate.supervisor.children import ProcessSpec, SupervisedProcess
from tidegate.supervisor.process_record import ProcessRecord

pytestmark = pytest.mark.process
SLEEP = ProcessSpec(name="sleeper", argv=(sys.executable, "-c", "import time; time.sleep(600)"), env={})
FULL = OSError(errno.ENOSPC, "no space left on device")


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SupervisedProcess:
    monkeypatch.setattr(children, "BACKOFF", Backoff(0.01, 0.01))
    state = StateDir(tmp_path).ensure()
    notes: list[str] = []
    return SupervisedProcess(SLEEP, state, ProcessRecord(state), note=notes.append)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.01)


def failing(errors: list[Exception]) -> Callable[[], Awaitable[None]]:
    async def prepare() -> None:
        if errors:
            raise errors.pop()

    return prepare


async def test_a_preparation_that_fails_is_a_failed_start(child: SupervisedProcess) -> None:
    notes: list[str] = []
    child.note = notes.append
    child.before_restart = failing([RuntimeError("can't start new thread"), FULL])
    child.start()
    await until(lambda: child.pid)
    child.kill()
    await until(lambda: child.restarts == 3 and child.pid)
    assert child.failures == 3
    assert [note for note in notes if "cannot" in note] == [
        "sleeper cannot be started: [Errno 28] no space left on device",
        "sleeper cannot be started: can't start new thread",
    ]
    await child.stop(60.0)
    assert not child.pid


async def test_a_child_whose_exit_cannot_be_handled_is_started_again_and_stopped(
    child: SupervisedProcess,
) -> None:
    notes: list[str] = []
    child.note = notes.append

    def full(pid: int) -> None:
        raise OSError(errno.ENFILE, "too many open files in system")

    child.on_exit = full
    child.start()
    await until(lambda: child.pid)
    child.kill()
    await until(lambda: child.restarts == 1 and child.pid)
    assert notes == [
        "after the exit of sleeper: [Errno 23] too many open files in system",
        "sleeper exited (SIGKILL); restart in 0.0 s",
    ]
    await child.stop(60.0)
    assert not child.pid


async def test_no_process_is_started_for_a_stop_during_a_preparation(child: SupervisedProcess) -> None:
    preparing = asyncio.Event()
    go_on = asyncio.Event()

    async def prepare() -> None:
        preparing.set()
        await go_on.wait()

    exits: list[int] = []
    child.on_exit = exits.append
    child.before_restart = prepare
    child.start()
    await until(lambda: child.pid)
    child.kill()
    async with asyncio.timeout(60):
        await preparing.wait()
    stopping = asyncio.ensure_future(child.stop(60.0))
    await asyncio.sleep(0)
    go_on.set()
    await stopping
    assert len(exits) == 1


async def test_a_log_that_cannot_be_opened_is_a_failed_start(child: SupervisedProcess) -> None:
    path = child.state.logs / "sleeper.log"
    path.mkdir()
    child.start()
    await until(lambda: child.failures > 1)
    assert not child.pid
    path.rmdir()
    await until(lambda: child.pid)
    await child.stop(60.0)


async def test_a_child_without_a_log_is_stopped(child: SupervisedProcess) -> None:
    (child.state.logs / "sleeper.log").mkdir()
    child.start()
    await until(lambda: child.failures)
    await child.stop(60.0)
