"""Drives an engine's ASGI app: whole answers with httpx, open streams and clients that leave by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from policy.config.deployment import Sim
from policy.types import EngineKind, Runner
from serve.engine.interface import Engine, EngineSpec, Message
from serve.engine.sim.engine import create

# A step takes no time at FAST, and never ends within a test at FROZEN.
FAST = 1e6
FROZEN = 1e-6


def spec(
    *,
    runner: Runner = Runner.GENERATE,
    speed: float = FAST,
    seed: int = 0,
    slots: int = 0,
    adapter_load_s: float = 0.0,
    **engine_args: Any,
) -> EngineSpec:
    """A small simulated engine called ``base`` with one adapter, ``sql``, and ``slots`` for others."""
    return EngineSpec(
        kind=EngineKind.SIM,
        model="base",
        runner=runner,
        host="127.0.0.1",
        secret="s",
        bound=64,
        engine_args={"max_model_len": 512, "lora_modules": {"sql": "/adapters/sql"}, **engine_args},
        sim=Sim(profile="sim-small", speed=speed, seed=seed, adapter_load_s=adapter_load_s),
        adapter_slots=slots,
        max_rank=16,
    )


@asynccontextmanager
async def engine_of(spec: EngineSpec) -> AsyncIterator[Engine]:
    """A running engine, closed in the end."""
    engine = await create(spec)
    try:
        yield engine
    finally:
        await engine.close()


def client_of(engine: Engine) -> httpx.AsyncClient:
    """An HTTP client of the engine's app."""
    transport = httpx.ASGITransport(engine.app, raise_app_exceptions=False)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://engine")


def events_of(text: str) -> list[Any]:
    """The data of each server-sent event; ``[DONE]`` stays text."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else msgspec.json.decode(item) for item in data]


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until ``condition`` holds; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - an engine's counts have no event
        await asyncio.sleep(0)


class OpenRequest:
    """A POST whose client can leave: :meth:`leave` is the disconnect, ``sent`` what the app said."""

    def __init__(self, engine: Engine, path: str, body: dict[str, Any]) -> None:
        self.sent: list[Message] = []
        self._gone = asyncio.Event()
        self._body: bytes | None = msgspec.json.encode(body)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "server": ("engine", 80),
            "client": ("client", 1),
        }
        self.task = asyncio.ensure_future(engine.app(scope, self._receive, self._send))

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
