"""A response writer over plain HTTP, where the connection brings none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from serve.engine.frame_server import MAX_KEPT
from serve.engine.interface import Receive, Send

log: Final = logging.getLogger("tidegate.engine")


class PlainHttpWriter:
    """:class:`serve.engine.interface.ResponseWriter` over an ASGI server's ``receive`` and ``send``.

    What is written while ``send`` waits for a slow client leaves together afterwards. Leaving its context
    waits until the client has everything. Beyond :data:`MAX_KEPT` bytes the response is cut, as over frames.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._parts: list[bytes] = []
        self._size = 0
        self._head: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._written = asyncio.Event()
        self._ended = self._left = False
        self._aborted: Callable[[], None] | None = None

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._head = (status, headers)

    def write(self, data: bytes) -> None:
        if self._left:
            return
        self._parts.append(data)
        self._written.set()
        self._size += len(data)
        if self._size > MAX_KEPT:
            log.warning("a response is cut: its client left %d bytes unread", self._size)
            self._abort()

    def end(self, data: bytes = b"") -> None:
        if self._left:  # without a last message the server closes the connection
            return
        self._ended = True
        self._parts.append(data)
        self._written.set()

    def on_abort(self, callback: Callable[[], None]) -> None:
        self._aborted = callback
        if self._left:
            callback()

    async def __aenter__(self) -> Self:
        self._delivering = asyncio.create_task(self._deliver())
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._ended and error is None:
                await self._delivering
        finally:
            self._listening.cancel()
            self._delivering.cancel()

    async def _deliver(self) -> None:
        more = True
        while more:
            await self._written.wait()
            self._written.clear()
            body, more = b"".join(self._parts), not self._ended
            self._parts.clear()
            self._size = 0
            if self._head is not None:
                status, headers = self._head
                self._head = None
                await self._send({"type": "http.response.start", "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not (self._left or self._ended):
            self._abort()

    def _abort(self) -> None:
        """Nobody wants the rest."""
        self._left = True
        self._parts.clear()
        if self._aborted is not None:
            self._aborted()
