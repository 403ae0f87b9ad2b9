"""HTTP: a request is what its bytes say however they are cut, and a connection leaves nothing behind.

The first byte of an input chooses where the rest is cut.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import uvloop
from starlette.types import Receive, Scope, Send

from gateway.http.server import HttpServer
from gateway.http.upload_budget import UploadBudget
from gateway.routing.shared_counters import LOCAL
from tests.gateway.http.memory_client import MemoryClient

LIMIT = 4096
HEAD = b"POST /v1 HTTP/1.1\r\nhost: x\r\n"
SEEDS = [
    bytes([cut]) + data
    for cut in (0, 1, 7)
    for data in (
        HEAD + b"content-length: 3\r\n\r\nabcGET / HTTP/1.0\r\n\r\n",
        HEAD
        + b"transfer-encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nx: y\r\n\r\n"
        + b"GET /a?b HTTP/1.1\r\nhost: y\r\n\r\n",
        HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\nab",
        HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 1\r\n\r\na",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 9999\r\n\r\n" + b"a" * 9,
        b"GET http://x/v1/%2e%2e HTTP/1.1\r\nhost: [::1]:80\r\nconnection: close\r\n\r\n",
        b"OPTIONS * HTTP/1.1\nhost: x\n folded\n\n",
        b"\x16\x03\x01\x02\x00\x01",
    )
]
WORDS = [
    b"\r\n", b"\r\n\r\n", b"content-length: ", b"transfer-encoding: chunked", b"host: x", b" HTTP/1.1",
    b"0\r\n\r\n", b"expect: 100-continue", b"connection: close", b"HEAD / HTTP/1.1\r\n", b"\0", b"\r",
]  # fmt: skip
_CHANGING = re.compile(rb"date: [^\r]*|x-request-id: [^\r]*")


class Site:
    """A server on a loop of its own."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.loop.set_exception_handler(self._failed)
        self.failure: BaseException | None = None
        self.seen: list[tuple[Any, ...]] = []
        self.server = self.loop.run_until_complete(self._start())

    async def _start(self) -> HttpServer:
        return HttpServer(
            self._app, lambda scope: LIMIT, lambda *_: None, LOCAL, UploadBudget(lambda: (1 << 20, 1 << 20))
        )

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failure = context.get("exception") or RuntimeError(str(context))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        self.seen.append(
            (scope["method"], scope["path"], scope["query_string"], scope["headers"], message["body"])
        )
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _talk(self, parts: list[bytes]) -> bytes:
        client = MemoryClient(self.server)
        for part in parts:
            await client.send(part)
        for _ in range(40):
            await asyncio.sleep(0)
        client.connection.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)
        return client.received

    def talk(self, parts: list[bytes]) -> tuple[list[tuple[Any, ...]], bytes]:
        """The requests that the app was asked, and all that was answered."""
        self.seen.clear()
        sent = self.loop.run_until_complete(self._talk(parts))
        if self.failure is not None:
            raise self.failure
        assert self.server.connections == 0
        assert not asyncio.all_tasks(self.loop)
        return list(self.seen), sent


site = Site()


def check(data: bytes) -> None:
    """Fails if the server does, or if ``data`` is taken for something else when it comes in parts."""
    cut, raw = (data[0] if data else 0), data[1:]
    size = 1 + cut
    whole = site.talk([raw])
    parts = site.talk([raw[at : at + size] for at in range(0, len(raw), size)])
    assert whole[0] == parts[0], (whole, parts)
    answers = [_CHANGING.sub(b"", sent) for _, sent in (whole, parts)]
    assert answers[0] == answers[1], answers
    assert not answers[0] or answers[0].startswith(b"HTTP/1.1 ")
