"""A replica on a raw socket with faults by model or by request, and a log of client disconnects."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.faults.proxy import Proxy
from tests.gateway.fake_replica import Answer, Exchange, FakeReplica, answer_json, reset


@dataclass(eq=False)
class Hit:
    """One request that reached the upstream; instants are seconds of ``time.monotonic``."""

    exchange: Exchange
    at: float
    ended_at: float | None = None
    left_at: float | None = None

    @property
    def text(self) -> str:
        body = self.exchange.json
        messages = body.get("messages")
        return str(messages[-1]["content"] if messages else body.get("prompt", body.get("input", "")))

    @property
    def probe(self) -> bool:
        return self.exchange.path == "/v1/completions" and self.exchange.json.get("max_tokens") == 1


class FaultyUpstream(FakeReplica):
    """Speaks the replica port's contract, or as ``external`` is any OpenAI-compatible server."""

    def __init__(
        self,
        name: str,
        model: str,
        *,
        usual: Answer = answer_json,
        faults: Mapping[str, Answer] | None = None,
        bound: int = 64,
        external: bool = False,
        frames: bool = True,
    ) -> None:
        super().__init__(name, model, bound=bound, frames=frames)
        self.usual = usual
        self.faults = dict(faults or {})
        self.external = external
        self.log: list[Hit] = []
        self.probes: list[Hit] = []
        self.pretended = 0
        self.lies: dict[str, Any] = {}
        self.frozen = False
        self.proxy: Proxy | None = None
        self.answer = self._dispatch

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port if self.proxy is None else self.proxy.port}"

    @property
    def reached(self) -> tuple[int, set[int]]:
        if self.proxy is not None:
            return self.proxy.port, set(self.proxy.links.values())
        return self.port, {one.transport.get_extra_info("peername")[1] for one in self.connections}

    @property
    def aborted(self) -> list[Hit]:
        return [hit for hit in self.log if hit.left_at is not None]

    @property
    def open(self) -> list[Hit]:
        return [hit for hit in self.log if hit.ended_at is None]

    def refuse_connections(self) -> None:
        """Close only the listening socket: the load stream stays open, new connections are refused."""
        assert self._server is not None
        self._server.close()

    def close_idle(self) -> int:
        idle = [c for c in self.connections if c.exchange is not None and c.exchange.answered]
        for connection in idle:
            connection.transport.close()
        return len(idle)

    def die(self) -> None:
        self.refuse_connections()
        for connection in list(self.connections):
            reset(connection.transport)

    def load(self) -> dict[str, Any]:
        load = super().load()
        return {**load, "in_flight": load["in_flight"] + self.pretended, **self.lies}

    async def respond(self, exchange: Exchange) -> None:
        if exchange.path == "/internal/load":
            exchange.chunk = self._unless_frozen(exchange.chunk)  # type: ignore[method-assign]
        if not self.external:
            await super().respond(exchange)
        elif exchange.path == "/v1/models":
            listed = {"object": "list", "data": [{"id": self.model, "object": "model"}]}
            await exchange.reply(json.dumps(listed).encode())
        elif exchange.path == "/metrics":
            await exchange.reply(b"{}", status=404)
        else:
            await self._dispatch(exchange)

    def _unless_frozen(self, send: Callable[[bytes], Awaitable[None]]) -> Callable[[bytes], Awaitable[None]]:
        async def chunk(data: bytes) -> None:
            if not self.frozen:
                await send(data)

        return chunk

    async def _dispatch(self, exchange: Exchange) -> None:
        hit = Hit(exchange, time.monotonic())
        (self.probes if hit.probe else self.log).append(hit)
        watching = asyncio.create_task(self._note_leaving(hit))
        fault = self.faults.get(hit.text) or self.faults.get(exchange.json["model"]) or self.usual
        try:
            await fault(exchange)
        finally:
            hit.ended_at = time.monotonic()
            watching.cancel()
            if hit.left_at is None and exchange.gone.is_set():
                hit.left_at = hit.ended_at

    async def _note_leaving(self, hit: Hit) -> None:
        await hit.exchange.gone.wait()
        hit.left_at = time.monotonic()
