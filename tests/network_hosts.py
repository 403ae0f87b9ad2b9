"""Two hosts on one machine: network namespaces that are joined by a cable."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ADDRESS, OTHER = "10.98.0.1", "10.98.0.2"
PATIENCE_S = 120.0
# For a port that does not answer.
_CONNECT_S = 0.5

_LISTENERS = """
import json, psutil
found = []
for each in psutil.net_connections(kind="tcp"):
    if each.status == psutil.CONN_LISTEN:
        line = " ".join(psutil.Process(each.pid).cmdline())
        found.append([each.laddr.ip.removeprefix("::ffff:"), each.laddr.port, line])
print(json.dumps(found))
"""
_REACHED = f"""
import json, socket, sys
found = []
for port in json.loads(sys.argv[2]):
    try:
        socket.create_connection((sys.argv[1], port), {_CONNECT_S}).close()
        found.append(port)
    except OSError:
        pass
print(json.dumps(found))
"""


class Host:
    """A namespace of the network and of processes, by a process in it; its end ends all others there."""

    def __init__(self) -> None:
        argv = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"]
        self._outside = subprocess.Popen(argv)
        children = Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children")
        deadline = time.monotonic() + PATIENCE_S
        while not (found := children.read_text().split()):
            assert time.monotonic() < deadline
        self.pid = found[0]
        while Path(f"/proc/{self.pid}/comm").read_text() != "sleep\n":  # then /proc is its own
            assert time.monotonic() < deadline

    def run(self, *argv: str, check: bool = True, **more: Any) -> str:
        """Run a command on this host; returns its output."""
        enter = ["nsenter", "--target", self.pid, "--net", "--pid", "--mount", *argv]
        done = subprocess.run(enter, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **more)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """Start a command on this host."""
        enter = ["nsenter", "--target", self.pid, "--net", "--pid", "--mount", *argv]
        return subprocess.Popen(enter, stdout=subprocess.PIPE, text=True)

    def listeners(self) -> list[tuple[str, int, str]]:
        """Address and port of each listening TCP socket, and the command line of its process."""
        return [tuple(each) for each in json.loads(self.run(sys.executable, "-c", _LISTENERS))]

    def reaches(self, address: str, ports: Sequence[int]) -> list[int]:
        """Which ports of another host answer this one."""
        return list(json.loads(self.run(sys.executable, "-c", _REACHED, address, json.dumps(ports))))

    def end(self) -> None:
        self._outside.kill()
        self._outside.wait()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """A host at :data:`ADDRESS` and another at :data:`OTHER`; skips without the privileges."""
    tools = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if tools:
        pytest.skip(f"needs {', '.join(tools)}")
    probe = subprocess.run(
        [shutil.which("unshare") or "", "--net", "true"], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        pytest.skip(f"may not make network namespaces: {probe.stderr.strip()}")
    one, other = Host(), Host()
    try:
        one.run("ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        # By a process that sees the ids of both.
        move = ["nsenter", f"--net=/proc/{one.pid}/ns/net", "ip", "link", "set", "cable1", "netns", other.pid]
        subprocess.run(move, check=True)
        for host, name, address in ((one, "cable0", ADDRESS), (other, "cable1", OTHER)):
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "address", "add", f"{address}/24", "dev", name)
            host.run("ip", "link", "set", name, "up")
        one.run("ip", "route", "add", "default", "via", OTHER)
        yield one, other
    finally:
        one.end()
        other.end()
