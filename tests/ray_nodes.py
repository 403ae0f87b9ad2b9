"""A Ray cluster of two nodes with two addresses on this machine, to be joined rather than started."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import eventually
from tests.ports import free_ports

HEAD, NODE = "127.0.0.2", "127.0.0.3"
GPUS_EACH = 4
# What `ray start` prints once the cluster knows the node.
_STARTED = "Ray runtime started."


@contextmanager
def two_nodes(*options: str) -> Iterator[str]:
    """The cluster's address; the second node is started with further ``options``."""
    with pytest.MonkeyPatch.context() as patch:
        yield from _cluster(patch, options)


def _cluster(monkeypatch: pytest.MonkeyPatch, options: Sequence[str]) -> Iterator[str]:
    # Ray puts unix sockets below its directory, and their paths are short.
    folder = Path(tempfile.mkdtemp(prefix="tgr-"))
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    gcs, dashboard, client = free_ports(3)
    address = f"{HEAD}:{gcs}"
    common = [
        "--block",
        "--num-cpus",
        "1",
        "--num-gpus",
        str(GPUS_EACH),
        "--object-store-memory",
        "100000000",
        "--disable-usage-stats",
    ]
    head = ["--head", "--node-ip-address", HEAD, "--port", str(gcs), "--dashboard-port", str(dashboard)]
    head += ["--temp-dir", str(folder / "ray"), "--ray-client-server-port", str(client)]
    node = ["--address", address, "--node-ip-address", NODE, *options]
    ray = str(Path(sys.executable).with_name("ray"))
    env = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "log").open("wb") as log:
        try:
            for words in (head, node):
                started.append(
                    subprocess.Popen([ray, "start", *words, *common], stdout=log, stderr=log, env=env)
                )
                eventually(lambda: (folder / "log").read_text().count(_STARTED) == len(started), 240)
            yield address
        finally:
            for process in reversed(started):
                family = [process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))]
                process.terminate()
                process.wait(60)
                _end(family)
            shutil.rmtree(folder, ignore_errors=True)


def _end(pids: list[int]) -> None:
    for pid in pids:
        try:
            psutil.Process(pid).kill()
        except psutil.NoSuchProcess:
            continue
