"""A running deployment for end-to-end tests: the real command line, on ports and files of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from policy.types import FleetSnapshot, Replica
from serve.controller.client import ControllerClient
from serve.controller_api_schema import ModelStatus
from store.state_dir import StateDir
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]


def on_free_ports(document: dict[str, Any]) -> dict[str, Any]:
    """The document with free ports, apart from other deployments."""
    port, admin, controller, dashboard, gcs = free_ports(5)
    return document | {
        "gateway": document.get("gateway", {}) | {"port": port, "admin_port": admin},
        "cluster": document.get("cluster", {})
        | {"controller": f"127.0.0.1:{controller}", "dashboard_port": dashboard, "gcs_port": gcs},
    }


class Stack:
    """One deployment, started and stopped as a user would."""

    def __init__(self, folder: Path, document: dict[str, Any], *flags: str) -> None:
        self.document = on_free_ports(document)
        self.file = folder / "deployment.yaml"
        self.write()
        self.state = StateDir(folder / "state")
        self.base_url = f"http://127.0.0.1:{self.document['gateway']['port']}/v1"
        self.admin_url = f"http://127.0.0.1:{self.document['gateway']['admin_port']}"
        self._flags = flags
        self.output = ""

    def write(self) -> None:
        """Write the document, in its own order: the first mode is the one that starts."""
        self.file.write_text(yaml.safe_dump(self.document, sort_keys=False))

    def apply(self) -> None:
        self.write()
        done = self.run("apply", str(self.file))
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tidegate", "--state-dir", str(self.state.root), *arguments],
            cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def up(self, timeout_s: float = 700) -> None:
        """Start and keep the output; a failure has that and all logs."""
        done = self.run("up", str(self.file), *self._flags, timeout_s=timeout_s)
        if done.returncode:
            logs = "\n".join(
                f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
                for path in sorted(self.state.logs.glob("*.log"))
            )
            raise AssertionError(f"up failed:\n{done.stdout}\n{done.stderr}\n{logs}")
        self.output = done.stdout

    def down(self) -> None:
        """Stop what runs, and assert that no process and no port is left; harmless when nothing runs."""
        self.controller.close()
        self.http.close()
        recorded = self.processes()
        done = self.run("down", timeout_s=300)
        assert done.returncode == 0, done.stdout + done.stderr
        _, alive = psutil.wait_procs(recorded, timeout=30)
        assert not alive, f"left behind: {[process.cmdline() for process in alive]}"
        for port in (self.document["gateway"]["port"], self.document["gateway"]["admin_port"]):
            with socket.socket() as sock:
                assert sock.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is still open"

    def processes(self) -> list[psutil.Process]:
        """Everything that belongs to this deployment: it carries its state directory or descends from it."""
        mark = str(self.state.root)
        own = [p for p in psutil.process_iter() if mark in " ".join(_cmdline(p))]
        found = {p.pid: p for parent in own for p in [parent, *_children(parent)]}
        found.pop(os.getpid(), None)
        return list(found.values())

    @cached_property
    def controller(self) -> ControllerClient:
        return ControllerClient(self.document["cluster"]["controller"], self.state.secret())

    @cached_property
    def http(self) -> httpx.Client:
        """For requests that need no connection of their own: making a client costs 20 ms."""
        return httpx.Client(timeout=300, trust_env=False)

    def fleet(self) -> FleetSnapshot:
        return self.controller.fleet()

    def replicas(self, model: str) -> list[Replica]:
        return [replica for replica in self.fleet().replicas if replica.model == model]

    def model(self, name: str) -> ModelStatus:
        return next(model for model in self.controller.status().models if model.name == name)

    def steady(self, name: str, count: int, timeout_s: float = 600) -> None:
        """Wait until the model has exactly ``count`` replicas, all ready, and nothing else to do."""
        eventually(
            lambda: self.model(name).phase == "steady" and len(self.replicas(name)) == count,
            timeout_s,
            lambda: f"{self.model(name)} {self.replicas(name)}",
        )

    def status(self) -> dict[str, Any]:
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        decoded: dict[str, Any] = json.loads(done.stdout)
        return decoded

    def ask_replica(self, replica: Replica, path: str, *, secret: bool = True) -> httpx.Response:
        headers = {"x-tidegate-secret": self.state.secret()} if secret else {}
        return self.http.get(f"{replica.url}{path}", headers=headers)


@contextmanager
def running(document: dict[str, Any], *flags: str) -> Iterator[Stack]:
    """A deployment of ``document``, started, and stopped in the end."""
    # Ray puts unix sockets below its directory, and their paths are short.
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        stack = Stack(Path(folder), document, *flags)
        try:
            stack.up()
            yield stack
        finally:
            stack.down()


def eventually(
    condition: Callable[[], bool], timeout_s: float, describe: Callable[[], str] = lambda: ""
) -> None:
    """Poll until ``condition`` holds; an exception counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except Exception as error:
            if time.monotonic() + 0.1 >= deadline:
                raise AssertionError(f"not within {timeout_s} s") from error
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {describe()}")


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []
