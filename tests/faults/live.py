"""Real processes behind a gateway worker: a local controller, its hosts, and engines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from loadtests.bench.parts.token_servers import ENGINE_ARGS, ENGINE_ENV, MAX_STREAMS
from policy.config.deployment import Cluster
from policy.wire.headers import SECRET_HEADER
from serve.actuator.local import LocalActuator
from store.state_dir import StateDir
from tests.faults.harness import Harness
from tests.gateway.fake_replica import SECRET
from tests.gateway.worker import ROOT, until
from tests.ports import free_ports

MODEL = "small"
# Also of vLLM, on cores that others use.
READY_S = 300.0


class Live(Harness):
    """A harness whose replicas are processes of a real local controller.

    Their engines are simulated, or vLLM's with the token benchmark's model in the directory ``source``.
    """

    def __init__(
        self,
        root: Path,
        gateway: dict[str, Any] | None = None,
        *,
        speed: float = 0.3,
        source: Path | None = None,
    ) -> None:
        super().__init__(root, gateway)
        engine: dict[str, Any] = {"engine": "sim", "sim": {"profile": "sim-small", "speed": speed}}
        if source is not None:
            engine = {"engine": "vllm", "source": str(source), "env": ENGINE_ENV, "engine_args": ENGINE_ARGS}
        self.state = StateDir(root)
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.models = [
            {
                "name": MODEL,
                **engine,
                "shapes": {"small": {"cpus": 1, "max_in_flight": 64 if source is None else MAX_STREAMS}},
                "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 4}}},
                "control": {
                    "mode": {"drain_timeout_s": 60},
                    "scale": {"min_healthy": 0},
                    "start_timeout_s": 60 if source is None else READY_S,
                },
            }
        ]
        self.plane: asyncio.subprocess.Process | None = None

    @property
    def controller_address(self) -> str:
        return self.address

    @asynccontextmanager
    async def running(self, replicas: int) -> AsyncIterator[Live]:
        try:
            await self.start_controller()
            await self.start_worker()
            await self.scale(replicas)
            yield self
        finally:
            await self.close()

    async def start_controller(self) -> None:
        """Start the controller and return once it answers; it finds running hosts."""
        self.write_secret()
        self.write_document()
        with (self.root / "controller.log").open("ab") as log:
            self.plane = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "serve.controller.process", "--state", str(self.root),
                cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip
        await until(self._answers, "the controller answers")

    async def end_controller(self, how: signal.Signals) -> None:
        assert self.plane is not None
        self.plane.send_signal(how)
        await self.plane.wait()

    async def call_controller(self, method: str, path: str, body: object = None) -> Any:
        async with httpx.AsyncClient(trust_env=False, timeout=60, headers={SECRET_HEADER: SECRET}) as client:
            answer = await client.request(method, f"http://{self.address}{path}", json=body)
            return answer.raise_for_status().json()

    async def _answers(self) -> bool:
        try:
            return bool((await self.call_controller("GET", "/status"))["pid"])
        except httpx.HTTPError:
            return False

    async def replicas_ready(self) -> dict[str, dict[str, Any]]:
        found = (await self.call_controller("GET", "/fleet"))["replicas"]
        return {replica["id"]: replica for replica in found if replica["state"] == "ready"}

    async def scale(self, count: int) -> dict[str, dict[str, Any]]:
        await self.call_controller("POST", "/scale", {"model": MODEL, "replicas": count})
        return await self.settle(count)

    async def settle(self, count: int) -> dict[str, dict[str, Any]]:
        """Wait until ``count`` replicas are ready and the gateway would send each of them requests."""

        async def settled() -> bool:
            ids = set(await self.replicas_ready())
            return len(ids) == count and await self.admits(ids)

        await until(settled, f"{count} replicas", READY_S)
        return await self.replicas_ready()

    async def close(self) -> None:
        if self.plane is not None and self.plane.returncode is None:
            await self.end_controller(signal.SIGKILL)
        for record in self.state.load(self.root / "hosts.json", list[dict[str, Any]]) or []:
            for host in record["processes"]:
                _resume(host["pid"])
        actuator = LocalActuator(self.state, Cluster(controller=""))
        await actuator.stop()
        await actuator.close()
        await super().close()


def send(pid: int, how: signal.Signals) -> float:
    os.kill(pid, how)
    return time.monotonic()


def host_of(engine: int) -> int:
    return psutil.Process(engine).ppid()


def _resume(host: int) -> None:
    if psutil.pid_exists(host):
        for process in (psutil.Process(host), *psutil.Process(host).children(recursive=True)):
            process.resume()
