"""Simulated engines as processes of their own, behind their real guards, for a gateway under test."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import httpx
import msgspec

from policy.config.deployment import Sim
from policy.types import EngineKind, Runner
from policy.wire.headers import SECRET_HEADER
from serve.engine.main import Event
from serve.engine.port import EngineSpec
from tests.gateway.fake_replica import SECRET
from tests.gateway.worker import ROOT


class SimReplica:
    """One engine process; what the controller says of it is :meth:`entry`, as of a fake replica."""

    def __init__(
        self,
        name: str,
        profile: str,
        *,
        speed: float = 1.0,
        model: str = "alpha",
        bound: int = 256,
        **args: Any,
    ) -> None:
        self.id = name
        self.model = model
        self.url = ""
        self._spec = EngineSpec(
            kind=EngineKind.SIM,
            replica=name,
            model=model,
            runner=Runner.GENERATE,
            shape="small",
            generation=1,
            host="127.0.0.1",
            secret=SECRET,
            bound=bound,
            engine_args=args,
            sim=Sim(profile=profile, speed=speed),
        )

    async def start(self) -> None:
        """Until its canary was answered."""
        reading, writing = os.pipe()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "serve.engine.main", "--events", str(writing),
            cwd=ROOT, stdin=asyncio.subprocess.PIPE, pass_fds=(writing,), start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self._spec) + b"\n")
        self._events = asyncio.StreamReader()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._events), os.fdopen(reading, "rb", 0)
        )
        while not self.url:
            event = msgspec.json.decode(await self._events.readline(), type=Event)
            assert not event.failed, event.failed
            self.url = event.url
        self._heard = asyncio.create_task(self._hear())

    async def _hear(self) -> None:
        """A pipe that nobody reads would stop the engine."""
        while await self._events.readline():
            pass

    def entry(self, state: str = "ready") -> dict[str, Any]:
        """This replica in a fleet snapshot."""
        return {
            "id": self.id,
            "model": self.model,
            "shape": "small",
            "generation": 1,
            "state": state,
            "load": {"at": 1.0, "bound": self._spec.bound},
            "url": self.url,
            "pid": self.process.pid,
        }

    async def served(self) -> int:
        """How many requests ended there, as its own metrics say."""
        async with httpx.AsyncClient(headers={SECRET_HEADER: SECRET}, trust_env=False) as client:
            text = (await client.get(f"{self.url}/metrics")).text
        counts = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
        return sum(int(float(line.rpartition(" ")[2])) for line in counts)

    async def stop(self) -> None:
        """Kill the process and everything in its group."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        await self._heard
        self._transport.close()
