"""A client of an endless NDJSON stream that reconnects, with back-off, whenever it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.http.http1_client import ConnectionPool, UpstreamConnection
from policy.wire.headers import SECRET_HEADER

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
# Senders write a line at least once a second; a sender that is silent for longer is stuck.
SILENCE_S = 5.0
MAX_LINE_BYTES = 16 * 1024 * 1024


class StreamConnector(Protocol):
    """Opens the connections of a stream."""

    @property
    def host_header(self) -> bytes:
        """The server's name."""

    async def connect(self) -> UpstreamConnection:
        """A new connection, for one request; raises ``OSError``, which includes ``TimeoutError``."""


class NdjsonStream:
    """A subscription. ``on_line`` gets each complete line in the loop iteration in which it arrives.

    Of several ``urls`` the next one is tried whenever the stream is unavailable.
    ``on_down`` is called when the stream is unavailable: refused, broken, silent, or not 200; ``silent`` is
    then whether the server accepted the connection and sent nothing.
    """

    def __init__(
        self,
        urls: Sequence[str],
        path: str,
        secret: str,
        connect_timeout_s: float,
        *,
        on_line: Callable[[bytes], None],
        on_down: Callable[[], None],
        connects: StreamConnector | None = None,
    ) -> None:
        self._ways: list[StreamConnector] = (
            [ConnectionPool(url, connect_timeout_s, max_idle=0) for url in urls]
            if connects is None
            else [connects]
        )
        self._start = f"GET {path} HTTP/1.1\r\nhost: ".encode()
        self._rest = f"\r\n{SECRET_HEADER}: {secret}\r\naccept: application/x-ndjson\r\n\r\n".encode()
        self._on_line = on_line
        self._on_down = on_down
        self.silent = False
        self._wake = asyncio.Event()
        self._connection: UpstreamConnection | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._lines = 0
        self._ended = asyncio.Event()

    def retry_now(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        pause = FIRST_RETRY_S
        try:
            while True:
                if await self._follow():
                    pause = FIRST_RETRY_S
                self._on_down()
                self._ways.append(self._ways.pop(0))
                self._wake.clear()
                try:
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                except TimeoutError:
                    pause = min(LAST_RETRY_S, pause * 2)
        finally:
            if self._connection is not None:
                self._connection.abort(self)

    async def _follow(self) -> bool:
        """Follow one connection to its end; returns whether it delivered a line."""
        self.silent = False
        try:
            self._connection = await self._ways[0].connect()
        except OSError:
            return False
        self._parts, self._size, self._lines = [], 0, 0
        self._ended.clear()
        self._connection.send(self, self._start + self._ways[0].host_header + self._rest, b"")
        seen = -1
        while seen != self._lines:
            seen = self._lines
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._ended.wait()
                    break
            except TimeoutError:
                continue
        self.silent = not self._ended.is_set()
        self._connection.abort(self)
        return self._lines > 0

    # Sink of the connection

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        if status != 200 and self._connection is not None:
            self._connection.abort(self)
            self._ended.set()

    def on_data(self, data: bytes, *, complete: bool) -> None:
        *lines, rest = data.split(b"\n")
        if lines and self._parts:  # joined once: a long line arrives in many reads
            lines[0] = b"".join((*self._parts, lines[0]))
            self._parts, self._size = [], 0
        for line in lines:
            self._lines += 1
            if line:
                self._on_line(line)
        if rest:
            self._parts.append(rest)
            self._size += len(rest)
        if complete or self._size > MAX_LINE_BYTES:
            self._ended.set()

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        self.on_data(data, complete=False)

    def on_lost(self, *, stale: bool) -> None:
        self._ended.set()
