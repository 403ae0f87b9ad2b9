"""Processes of the benchmark: systems under measurement on chosen cores, and the simulated upstream."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from loadtests.bench.replica import MockReplicaCounts, MockReplicaSettings
from loadtests.bench.upstream import UpstreamCommand

STOP_S = 10.0


def cpu_clock(pid: int) -> int:
    """The clock id of a process's processor time (clock_getcpuclockid(3)).

    It has nanoseconds, where ``/proc`` has hundredths of a second, and includes threads that ended.
    """
    return (~pid << 3) | 2


def pinned(argv: Sequence[str], cores: Sequence[int]) -> list[str]:
    """A command line that runs on ``cores`` alone with the same process id."""
    return ["/usr/bin/taskset", "-c", ",".join(map(str, cores)), *argv]


class ProcessTree:
    """One or more processes and all their children; ``log`` gets their output."""

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
        return self._log.read_text(errors="replace")[-2000:]

    def processes(self) -> list[psutil.Process]:
        """Those that run, parents first."""
        found: list[psutil.Process] = []
        for root in self._roots:
            if root.poll() is not None:
                continue
            parent = psutil.Process(root.pid)
            found += [parent, *parent.children(recursive=True)]
        return found

    def cpu_s(self) -> float:
        """Processor time used so far, user and system, in seconds."""
        return sum(time.clock_gettime(cpu_clock(process.pid)) for process in self.processes())

    def memory(self) -> int:
        """Resident bytes now."""
        return sum(process.memory_info().rss for process in self.processes())

    def peak(self) -> int:
        """The sum of each process's largest resident size, in bytes."""
        total = 0
        for process in self.processes():
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
        return total

    def stop(self) -> None:
        """Terminate them; kill those that do not exit."""
        everyone = [process for process in self.processes() if process.is_running()]
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


ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    """Unused loopback ports."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


class MockUpstream:
    """A handle on the upstream: ``ports`` of its replicas, and its control connection."""

    def __init__(self, ports: list[int], control: int) -> None:
        self.ports = ports
        self._socket = socket.create_connection(("127.0.0.1", control))
        self._answers = self._socket.makefile("rb")

    @property
    def urls(self) -> list[str]:
        """Base URLs of the replicas."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def order(self, order: UpstreamCommand) -> list[MockReplicaCounts]:
        """Send an order; returns the counts of each replica after it."""
        self._socket.sendall(msgspec.json.encode(order) + b"\n")
        return msgspec.json.decode(self._answers.readline(), type=list[MockReplicaCounts])

    def configure(self, setting: MockReplicaSettings) -> None:
        """Set the behaviour of all replicas, with empty caches and counts."""
        self.order(UpstreamCommand(setting=setting))

    def counts(self) -> list[MockReplicaCounts]:
        """The counts of each replica since they were configured."""
        return self.order(UpstreamCommand())

    def close(self) -> None:
        self._answers.close()
        self._socket.close()


@contextmanager
def mock(replicas: int, cores: Sequence[int]) -> Iterator[MockUpstream]:
    """An upstream process with ``replicas`` ports, on ``cores``."""
    ports = free_ports(replicas)
    process = subprocess.Popen(
        pinned([sys.executable, "-m", "loadtests.bench.upstream", *map(str, ports)], cores),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        control = int(process.stdout.readline().split()[1])
        handle = MockUpstream(ports, control)
        try:
            yield handle
        finally:
            handle.close()
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
