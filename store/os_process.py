"""Processes of the operating system: found again by id and start, and ended by SIGTERM, then SIGKILL.

Also what this process uses, its limit of descriptors, and which start of the machine this is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import resource
import signal
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import psutil

# A start time is computed from the kernel's boot time, which moves when the clock is set: it identifies a
# process only where no start key was recorded, as by versions that had none.
_SAME_START_S = 2.0
_KILL_S = 5.0
_POLL_S = 0.02
MAX_DESCRIPTORS = 65_536
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessUsage(NamedTuple):
    """Seconds of all processors since the start, bytes of memory, descriptors, and the start in Unix time."""

    cpu_s: float
    resident_bytes: int
    open_fds: int
    max_fds: int
    started_at: float


def allow_connections() -> None:
    """Raise this process's soft limit of descriptors to the hard one, up to :data:`MAX_DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def boot_key() -> int:
    """A number of 64 bits that is another one after each start of this machine."""
    return int.from_bytes(uuid.UUID(_BOOT_ID.read_text().strip()).bytes[:8])


def read_usage() -> ProcessUsage:
    """The usage of this process now; thousands of descriptors take milliseconds."""
    process = psutil.Process()
    with process.oneshot():
        times = process.cpu_times()
        return ProcessUsage(
            times.user + times.system,
            process.memory_info().rss,
            process.num_fds(),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            process.create_time(),
        )


def local_user() -> str:
    """This process's user, for the audit trail."""
    try:
        return f"user {pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:  # of a container
        return f"user {os.getuid()}"


def started_at(pid: int) -> float | None:
    """When the process ``pid`` was started (Unix seconds); ``None`` once it is gone."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None


def start_key(pid: int) -> str:
    """Distinguishes the process ``pid`` from every other one that has its id; empty once it is gone.

    It is the start of the machine, and the process's own in clock ticks since then: no change of the clock
    moves it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        # The second field, the name in parentheses, may itself contain spaces and parentheses.
        ticks = stat.rpartition(b")")[2].split()[19].decode()
        return f"{boot_key():016x}-{ticks}"
    except (FileNotFoundError, ProcessLookupError):
        return ""


def find(pid: int, started: float | None = None, key: str = "") -> psutil.Process | None:
    """The running process ``pid`` if it has the start ``key``, or without one if it ``started`` then.

    ``None`` for a later one and for a zombie.
    """
    try:
        found = psutil.Process(pid)
        if key:
            same = start_key(pid) == key
        else:
            same = started is None or abs(found.create_time() - started) < _SAME_START_S
        return found if same and found.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """A process; ``start_key`` distinguishes it from a later one with the same id.

    The record of a version that kept no key has an empty one: ``created`` (Unix seconds) does so then.
    """

    pid: int
    created: float
    start_key: str = ""

    def process(self) -> psutil.Process | None:
        """The running process, if there is one."""
        return find(self.pid, self.created, self.start_key)

    def with_key(self) -> Self:
        """This running process, with the key that an earlier version did not record."""
        return self if self.start_key else msgspec.structs.replace(self, start_key=start_key(self.pid))


def terminate(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()


def end_all(processes: Collection[psutil.Process], grace_s: float) -> tuple[psutil.Process, ...]:
    """SIGTERM to all, SIGKILL after ``grace_s`` seconds; returns those that still run. Blocks meanwhile."""
    for process in processes:
        terminate(process)
    for process in _wait(processes, grace_s):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return _wait(processes, _KILL_S)


async def end_child(
    process: asyncio.subprocess.Process, grace_s: float, *, group: bool = False, kill_s: float = _KILL_S
) -> bool:
    """SIGTERM to a child, SIGKILL after ``grace_s`` seconds; returns whether it ended.

    One in an uninterruptible call does not end; it is waited for ``kill_s`` seconds. With ``group`` the rest
    of the process group that it leads is killed, too.
    """
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        elif process.returncode is None:
            process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(kill_s):
            await process.wait()
    return process.returncode is not None


def _wait(processes: Collection[psutil.Process], timeout_s: float) -> tuple[psutil.Process, ...]:
    deadline = time.monotonic() + timeout_s
    while left := tuple(each for each in processes if _runs(each)):
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
