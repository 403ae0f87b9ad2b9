"""A Ray head of the tests' own, started and ended by process id; other Rays are left alone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from serve.ray_launcher import head_command, temp_dir
from store.state_dir import StateDir
from tests.ports import free_ports
from tests.serve.sim_documents import document

START_S = 240.0
SIMULATED_GPUS = 8


@dataclass(frozen=True)
class RayHead:
    """A running head: ``deployment`` names its ports, ``state`` keeps its token."""

    state: StateDir
    deployment: Deployment
    process: subprocess.Popen[bytes]

    def processes(self) -> list[psutil.Process]:
        """What the head has started, without itself."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def ray_head(root: Path, **cluster: object) -> Iterator[RayHead]:
    """Start a head with its state directory at ``root``; end it and all that it started."""
    gcs, dashboard, controller = free_ports(3)
    ports = {"gcs_port": gcs, "dashboard_port": dashboard, "controller": f"127.0.0.1:{controller}"}
    cluster = {**ports, "simulated_gpus": SIMULATED_GPUS, **cluster}
    state, deployment = StateDir(root).ensure(), parse(document(cluster=cluster))
    argv, env = head_command(deployment, state)
    argv += ["--num-cpus", "8"]
    with (root / "head.log").open("wb") as log:
        process = subprocess.Popen(
            argv, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _await_port(dashboard, process, root / "head.log")
        yield RayHead(state, deployment, process)
    finally:
        _end(process)
        shutil.rmtree(temp_dir(state), ignore_errors=True)


def _await_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"Ray's dashboard did not come up:\n{log.read_text()[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(started, 30)
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, 5)
