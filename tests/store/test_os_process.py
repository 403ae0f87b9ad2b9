"""Processes: found by id and start time, and ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import psutil
import pytest

from store.os_process import end_all, end_child, find, start_key, started_at

pytestmark = pytest.mark.process

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
)


@pytest.fixture
def stubborn() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_is_distinguished_from_a_later_one_with_its_id(stubborn: subprocess.Popen[bytes]) -> None:
    started = started_at(stubborn.pid)
    assert started is not None
    assert find(stubborn.pid) is not None
    assert find(stubborn.pid, started) is not None
    assert find(stubborn.pid, started - 10.0) is None


def test_a_clock_that_is_set_makes_no_other_process(
    stubborn: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, key = started_at(stubborn.pid), start_key(stubborn.pid)
    found = find(stubborn.pid, started, key)
    assert found is not None
    booted = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 3600.0)
    assert find(stubborn.pid, started) is None
    assert find(stubborn.pid, started, key) == found
    boot, _, ticks = key.partition("-")
    assert find(stubborn.pid, started, f"{boot}-{int(ticks) + 1}") is None
    assert find(stubborn.pid, started, f"{int(boot, 16) ^ 1:016x}-{ticks}") is None
    # It ignores SIGTERM, and does not count as ended before SIGKILL.
    assert end_all([found], 0.1) == ()
    assert stubborn.wait() == -9
    assert start_key(stubborn.pid) == ""


def test_sigkill_follows_sigterm_and_a_zombie_counts_as_ended(stubborn: subprocess.Popen[bytes]) -> None:
    found = find(stubborn.pid)
    assert found is not None
    assert end_all([found], 0.1) == ()
    assert find(stubborn.pid) is None
    assert stubborn.wait() == -9
    assert started_at(stubborn.pid) is None


@pytest.mark.parametrize("group", [False, True])
async def test_a_child_is_collected(group: bool) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUBBORN, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    await child.stdout.readline()
    assert await end_child(child, 0.1, group=group)
    assert child.returncode == -9


async def test_a_child_that_does_not_end_is_waited_for_a_bounded_time() -> None:
    sent: list[str] = []

    class Uninterruptible:
        returncode = None

        def terminate(self) -> None:
            sent.append("SIGTERM")

        def kill(self) -> None:
            sent.append("SIGKILL")

        async def wait(self) -> None:
            await asyncio.Event().wait()

    child = cast("asyncio.subprocess.Process", Uninterruptible())
    assert not await end_child(child, 0.01, kill_s=0.01)
    assert sent == ["SIGTERM", "SIGKILL"]
