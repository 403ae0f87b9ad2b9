"""An engine in this process behind its guard, and two gateway workers in front of it."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvicorn

from policy.types import ReplicaPhase
from serve.engine.adapters.loader import AdapterLoader
from serve.engine.engine_server import MODULES
from serve.engine.interface import Engine, EngineSpec
from serve.engine.request_guard import RequestGuard
from store.event_loop.uvicorn_server import UvicornServer
from store.state_dir import listen
from tests.gateway.fake_replica import SECRET
from tests.gateway.worker import Stack
from tests.serve.engine.fakes import FakeFiles

MODEL = "alpha"
# Of a tenant that may ask for explanations.
KEY = "key-of-the-test"


class EngineReplica:
    """One engine at a time at a port of its own, as a gateway sees it; ``start`` is again after ``stop``."""

    def __init__(self, spec: EngineSpec) -> None:
        self.id = "r"
        self._spec = spec
        self._pid = 0
        self.url = ""
        self.engine: Engine

    async def start(self) -> None:
        self.engine = await importlib.import_module(MODULES[self._spec.kind]).create(self._spec)
        adapters = AdapterLoader(self.engine, FakeFiles())
        guard = RequestGuard(self.engine, adapters, secret=SECRET, bound=self._spec.bound, clock=time.time)
        sock = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._pid += 1
        self._server = UvicornServer(
            uvicorn.Config(
                guard, access_log=False, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
            )
        )
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]))
        guard.become(ReplicaPhase.READY)

    async def stop(self) -> None:
        self._server.should_exit = True
        await asyncio.wait([self._task])
        await self.engine.close()

    def entry(self, state: str) -> dict[str, Any]:
        """This replica in a fleet snapshot."""
        load = {"at": 1.0, "in_flight": 0, "bound": self._spec.bound}
        return {
            "id": self.id, "model": MODEL, "shape": "small", "generation": 1, "state": state, "load": load,
            "url": self.url, "pid": self._pid,
        }  # fmt: skip


class Found(NamedTuple):
    """What the router believed to be cached of a prompt, and what the engine found, in tokens."""

    believed: int
    cached: int
    prompt: int


class Agreement:
    """The sums over some requests; ``error`` is the mean absolute error per prompt token."""

    def __init__(self, found: list[Found]) -> None:
        self.requests = len(found)
        self.prompt = sum(each.prompt for each in found)
        self.cached = sum(each.cached for each in found)
        self.error = sum(abs(each.believed - each.cached) for each in found) / self.prompt

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.prompt} prompt tokens, {self.cached / self.prompt:.1%} cached, "
            f"error {self.error:.2%} of the tokens"
        )


class Clients:
    """Requests over shared beginnings of different lengths, each on a connection of its own."""

    def __init__(self, stack: Stack, seed: int, beginnings: int, *, words: tuple[int, int]) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - draws, not secrets
        vocabulary = [
            "river",
            "stone",
            "quiet",
            "green",
            "paper",
            "window",
            "seven",
            "cloud",
            "narrow",
            "winter",
            "silver",
            "market",
        ]
        self._beginnings = [
            f"Topic {number}. "
            + " ".join(self._rng.choice(vocabulary) for _ in range(self._rng.randint(*words)))
            for number in range(beginnings)
        ]
        self._stack = stack
        # Each request has a connection of its own, so that any worker may take it.
        self._http = httpx.AsyncClient(
            timeout=300, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._number = 0

    async def ask(self) -> Found:
        """One request; a popular beginning comes more often than a rare one."""
        self._number += 1
        at = min(int(self._rng.expovariate(0.35)), len(self._beginnings) - 1)
        question = f"{self._number * 7919 % 10007} is my number. " + "Why? " * self._rng.randint(1, 12)
        messages = [
            {"role": "system", "content": self._beginnings[at]},
            {"role": "user", "content": question},
        ]
        body = {"model": MODEL, "messages": messages, "max_tokens": 1 + self._number % 4, "temperature": 0}
        headers = {"authorization": f"Bearer {KEY}", "x-tidegate-explain": "1", "connection": "close"}
        url = f"{self._stack.url}/v1/chat/completions"
        answer = await self._http.post(url, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        details = usage.get("prompt_tokens_details") or {}
        [candidate] = json.loads(answer.headers["x-tidegate-explain"])["candidates"]
        return Found(candidate["cached_tokens"], details.get("cached_tokens") or 0, usage["prompt_tokens"])

    async def run(self, requests: int, at_once: int = 2) -> Agreement:
        found: list[Found] = []
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                found.append(await self.ask())

        await asyncio.gather(*[client() for _ in range(at_once)])
        return Agreement(found)


@asynccontextmanager
async def deployed(spec: EngineSpec, root: Path) -> AsyncIterator[tuple[Stack, EngineReplica]]:
    """The engine of ``spec`` behind two gateway workers."""
    stack, replica = Stack(root), EngineReplica(spec)
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    stack.tenants = [{"name": "test", "keys_sha256": [digest], "admin": True}]
    await replica.start()
    try:
        await stack.start_controller()
        for number in range(2):
            await stack.start_worker(number)
        await stack.ready(replica)  # type: ignore[arg-type]
        yield stack, replica
    finally:
        await stack.close()
        await replica.stop()


async def restarted(stack: Stack, replica: EngineReplica) -> None:
    """End the engine and start another in its place."""
    await replica.stop()
    await replica.start()
    await stack.ready(replica)  # type: ignore[arg-type]
