"""Drives an engine's ASGI app: whole answers with httpx, and open requests whose clients disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from policy.config.deployment import SimConfig
from policy.types import EngineKind, Runner
from serve.engine.interface import ASGIApp, Engine, EngineSpec, Message
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
        sim=SimConfig(profile="sim-small", speed=speed, seed=seed, adapter_load_s=adapter_load_s),
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
    """A request whose client can leave: :meth:`leave` disconnects, ``sent`` is the answer so far."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        *body: bytes,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.sent: list[Message] = []
        self._gone = asyncio.Event()
        self._body = list(body)
        encoded = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": method,
            "path": path,
            "query_string": b"",
            "root_path": "",
            "headers": encoded,
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def _receive(self) -> Message:
        if self._body:
            body = self._body.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._body)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        """What was sent of the body."""
        return b"".join(message.get("body", b"") for message in self.sent)


def post(engine: Engine, path: str, body: dict[str, Any]) -> OpenRequest:
    """An open request with a JSON body."""
    return OpenRequest(engine.app, path, msgspec.json.encode(body))
