"""A program under measurement: started on chosen cores, its whole process tree's time and memory read."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

STOP_S = 10.0


def cpu_clock(pid: int) -> int:
    """The clock that ``time.clock_gettime`` reads a process's processor time by (clock_getcpuclockid(3)).

    It has nanoseconds, where ``/proc`` has hundredths of a second, and counts threads that ended.
    """
    return (~pid << 3) | 2


def pinned(argv: Sequence[str], cores: Sequence[int]) -> list[str]:
    """A command line that runs on ``cores`` alone; its process id stays the same."""
    return ["/usr/bin/taskset", "-c", ",".join(map(str, cores)), *argv]


class Tree:
    """One or more processes and all their children. ``log`` gets what they write."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._roots: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        argv: Sequence[str],
        cores: Sequence[int],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """Start one process on ``cores`` (its children inherit them)."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                pinned(argv, cores),
                cwd=cwd,
                env=env,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._roots.append(process)

    def check(self) -> None:
        """Raise RuntimeError with the end of the log if a process has ended."""
        for process in self._roots:
            if process.poll() is not None:
                raise RuntimeError(f"ended with {process.returncode}: {self.tail()}")

    def tail(self) -> str:
        """The last lines that were written."""
        return self._log.read_text(errors="replace")[-2000:]

    def _all(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for root in self._roots:
            parent = psutil.Process(root.pid)
            found += [parent, *parent.children(recursive=True)]
        return found

    def cpu_s(self) -> float:
        """Processor time used so far, user and system, in seconds."""
        return sum(time.clock_gettime(cpu_clock(process.pid)) for process in self._all())

    def memory(self) -> int:
        """Resident bytes now."""
        return sum(process.memory_info().rss for process in self._all())

    def peak(self) -> int:
        """The sum of each process's largest resident size, in bytes."""
        total = 0
        for process in self._all():
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
        return total

    def stop(self) -> None:
        """End them; those that do not listen are killed."""
        everyone = [process for process in self._all() if process.is_running()]
        for process in self._roots:
            process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in self._roots:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in everyone:
            if left.is_running() and left.pid != os.getpid():
                left.kill()
