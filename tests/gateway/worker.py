"""Real gateway worker processes on sockets that the test binds, and helpers that wait for states."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from store.state_dir import StateDir, write_atomic
from tests.gateway.fake_replica import SECRET, FakeController, FakeReplica
from tests.gateway.fake_upstream import FakeUpstream

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0


async def until(
    true: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str = "", within_s: float = PATIENCE_S
) -> None:
    """Poll until ``true``; fails after a time that no healthy machine needs."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while loop.time() < deadline:
        held = true()
        if await held if isinstance(held, Awaitable) else held:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"did not come true: {what or true}")


def model(name: str, **more: Any) -> dict[str, Any]:
    """A deployed model's entry in the document."""
    return {
        "name": name,
        "engine": "sim",
        "shapes": {"small": {"cpus": 1}},
        "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 8}}},
        **more,
    }


def admin_client(url: str, root: Path, tls: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    """A client of the admin port at ``url`` with the token of the state directory ``root``."""
    headers = {"authorization": f"Bearer {StateDir(root).admin_token()}"}
    # The server closes what is idle for five seconds, which is the client's own default.
    limits = httpx.Limits(keepalive_expiry=1.0)
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False, verify=tls or False, limits=limits
    )


class Stack:
    """A controller, replicas, and gateway workers in front of them."""

    def __init__(self, root: Path, host: str = "127.0.0.1") -> None:
        self.root = root
        self.controller = FakeController()
        self.replicas: list[FakeReplica] = []
        self.servers: list[FakeUpstream] = []
        self.workers: list[asyncio.subprocess.Process] = []
        self.gateway: dict[str, Any] = {"queue_timeout_s": 15}
        self.models = [model("alpha"), model("vectors", runner="pooling")]
        self.tracing: dict[str, Any] = {}
        self.tenants: list[dict[str, Any]] = []
        self.upstreams: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}
        self.store = ""
        self.client_socket = _bound(host)
        self.admin_socket = _bound()
        self.url = f"http://{host}:{self.client_socket.getsockname()[1]}"
        self.admin_url = f"http://127.0.0.1:{self.admin_socket.getsockname()[1]}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, trust_env=False)
        self.admin = admin_client(self.admin_url, root)

    def write_secret(self) -> None:
        # A running controller reads it at any moment.
        write_atomic(self.root / "secret", SECRET.encode(), mode=0o600)

    def write_document(self) -> None:
        document = {
            "models": self.models,
            "cluster": {"controller": f"127.0.0.1:{self.controller.port or 9}"},
            "gateway": self.gateway,
            "tracing": self.tracing,
            "tenants": self.tenants,
            "upstreams": self.upstreams,
            "store": self.store,
            **self.more,
        }
        part = self.root / "document.part"
        part.write_text(json.dumps(document))
        part.replace(self.root / "deployment.json")

    async def replica(self, name: str, **more: Any) -> FakeReplica:
        """Start a replica; it is in the fleet after :meth:`ready`."""
        replica = FakeReplica(name, **more)
        await replica.start()
        self.replicas.append(replica)
        return replica

    async def serve(self, name: str, **more: Any) -> FakeReplica:
        """Start a replica, make it the fleet, and wait until the worker would send it requests."""
        replica = await self.replica(name, **more)
        await self.ready(replica)
        return replica

    async def start_controller(self) -> None:
        await self.controller.start()

    async def start_worker(self, number: int = 0) -> asyncio.subprocess.Process:
        process = await self.spawn_worker(number, asyncio.subprocess.PIPE)
        assert process.stderr is not None
        while b"worker_started" not in (line := await process.stderr.readline()):
            assert line, "the worker died at its start"
        return process

    async def spawn_worker(
        self, number: int, stderr: int | BinaryIO, **environment: str
    ) -> asyncio.subprocess.Process:
        """Start a worker that logs to ``stderr``; it serves once it has logged so."""
        self.write_secret()
        self.write_document()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.worker_main",
            "--state", str(self.root),
            "--fd", str(self.client_socket.fileno()),
            "--admin-fd", str(self.admin_socket.fileno()),
            "--worker", str(number),
            cwd=ROOT,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self.root / "metrics"), **environment},
            pass_fds=(self.client_socket.fileno(), self.admin_socket.fileno()),
            stderr=stderr,
        )  # fmt: skip
        self.workers.append(process)
        return process

    async def ready(self, *replicas: FakeReplica) -> None:
        """Make ``replicas`` the fleet and wait until the worker would send them requests."""
        self.controller.set(*replicas)
        # One of the fleet before may have the same id.
        wanted = {(replica.id, replica.url) for replica in replicas}

        async def is_ready() -> bool:
            return {(entry["id"], entry["url"]) for entry in await self._admissible()} == wanted

        await until(is_ready, "fleet is ready")

    async def admits(self, ids: set[str]) -> bool:
        return ids == {entry["id"] for entry in await self._admissible()}

    async def _admissible(self) -> list[dict[str, Any]]:
        described = (await self.admin.get("/admin/fleet")).json()
        return [entry for entry in described["replicas"] if entry["admissible"]]

    async def chat(self, **more: Any) -> httpx.Response:
        body = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], **more}
        return await self.http.post("/v1/chat/completions", json=body)

    async def warm_up(self) -> None:
        """Serve one request: waits are then predicted from its measured service time, not an assumed one."""
        assert (await self.chat()).status_code == 200

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels, 0 where there is none yet."""
        return sum(
            float(line.rpartition(" ")[2])
            for line in (await self.admin.get("/metrics")).text.splitlines()
            if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items())
        )

    async def reaches(self, value: float, name: str, **labels: str) -> None:
        """Wait until :meth:`metric` is ``value``."""

        async def reached() -> bool:
            return await self.metric(name, **labels) == value

        await until(reached, f"{name} is {value}")

    async def queued(self, count: int) -> None:
        """Wait until ``count`` requests wait for the model "alpha"."""
        await self.reaches(count, "tidegate_queue_depth", model="alpha")

    async def shows(self, replica: FakeReplica, **fields: Any) -> None:
        """Wait until the worker describes ``replica`` by these fields."""

        async def shown() -> bool:
            entries = (await self.admin.get("/admin/fleet")).json()["replicas"]
            return any(entry.items() >= {"id": replica.id, **fields}.items() for entry in entries)

        await until(shown, f"{replica.id} is shown with {fields}")

    async def answers(self, status: int, path: str, headers: dict[str, str] | None = None) -> None:
        """Wait until GET ``path`` is answered with ``status``."""

        async def answered() -> bool:
            return (await self.http.get(path, headers=headers)).status_code == status

        await until(answered, f"{path} is answered with {status}")

    async def close(self) -> None:
        await self.http.aclose()
        await self.admin.aclose()
        for worker in self.workers:
            if worker.returncode is None:
                worker.send_signal(signal.SIGKILL)
            await worker.wait()
            if worker.stderr is not None:
                await worker.stderr.read()
        for server in (*self.replicas, *self.servers):
            await server.stop()
        if self.controller.port:
            await self.controller.stop()
        self.client_socket.close()
        self.admin_socket.close()


def _bound(host: str = "127.0.0.1") -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    sock.listen(512)
    sock.setblocking(False)
    sock.set_inheritable(True)
    return sock
