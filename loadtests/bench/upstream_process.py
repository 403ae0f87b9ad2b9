"""The process of the simulated replicas: start, configure, read its counts, stop."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from loadtests.bench.process_tree import pinned
from loadtests.bench.replica import Counts, Setting
from loadtests.bench.upstream import Order

ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nothing listens on now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


class Mock:
    """A handle on the upstream: ``ports`` of its replicas, and its control."""

    def __init__(self, ports: list[int], control: int) -> None:
        self.ports = ports
        self._socket = socket.create_connection(("127.0.0.1", control))
        self._answers = self._socket.makefile("rb")

    @property
    def urls(self) -> list[str]:
        """Base URLs of the replicas."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def order(self, order: Order) -> list[Counts]:
        """Tell it something; returns what each replica had counted after that."""
        self._socket.sendall(msgspec.json.encode(order) + b"\n")
        return msgspec.json.decode(self._answers.readline(), type=list[Counts])

    def configure(self, setting: Setting) -> None:
        """All replicas behave like this from now on, with empty caches and counts."""
        self.order(Order(setting=setting))

    def counts(self) -> list[Counts]:
        """What the replicas saw since they were configured."""
        return self.order(Order())

    def close(self) -> None:
        """Let go of the control connection."""
        self._answers.close()
        self._socket.close()


@contextmanager
def mock(replicas: int, cores: Sequence[int]) -> Iterator[Mock]:
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
        handle = Mock(ports, control)
        try:
            yield handle
        finally:
            handle.close()
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
