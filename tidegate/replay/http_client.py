"""Kept HTTP/1.1 connections that say when each read came.

A protocol of asyncio over httptools and not httpx: what a client does for each event of each stream decides
how many it can keep pace with, and the moment of a read is taken as it is read, not when a task has its turn.
"""

from __future__ import annotations

import asyncio
import ssl
from time import perf_counter
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S = 10.0
# Silence that nothing breaks any more; an engine's queue may be long.
SILENT_AFTER_S = 600.0


class Sink(Protocol):
    """Who hears an answer. Moments are seconds of ``perf_counter``."""

    def sent(self, at: float) -> None:
        """The request was written at this moment: making a connection is no part of its time."""
        ...

    def feed(self, data: bytes, at: float) -> None:
        """A read at this moment brought these bytes of the body."""
        ...


class WholeBody:
    """A body in one piece."""

    def __init__(self) -> None:
        self.body = b""

    def sent(self, at: float) -> None: ...

    def feed(self, data: bytes, at: float) -> None:
        self.body += data


class Connection(asyncio.Protocol):
    """One connection, one request at a time: ``used`` after its first, ``begun`` once its answer has."""

    def __init__(self) -> None:
        self.used = False
        self.begun = False
        self.keeps = True
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: Sink | None = None
        self._answer: asyncio.Future[int] | None = None
        self._heard_at = 0.0
        self._at = 0.0
        self._delimited = self._to_the_end = False

    @property
    def open(self) -> bool:
        """Whether another request can be sent on it."""
        return self.keeps and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, sink: Sink) -> int:
        """Send and hear the answer out; its status. Raises ``OSError`` when the connection breaks."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._answer, self._sink, self.begun = loop.create_future(), sink, False
        self._parser = httptools.HttpResponseParser(self)
        self._delimited = self._to_the_end = False
        self._heard_at = perf_counter()
        sink.sent(self._heard_at)
        self._transport.write(request)
        watch = loop.call_later(SILENT_AFTER_S, self._look)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            watch.cancel()
            self._answer = self._sink = None
            self.used = True

    def abort(self) -> None:
        """Hang up."""
        self.keeps = False
        if self._transport is not None:
            self._transport.abort()

    def _look(self) -> None:
        quiet_s = perf_counter() - self._heard_at
        if quiet_s >= SILENT_AFTER_S:
            self._fail(TimeoutError(f"silent for {quiet_s:.0f} s"))
        elif self._answer is not None:
            asyncio.get_running_loop().call_later(SILENT_AFTER_S - quiet_s, self._look)

    def _fail(self, error: BaseException) -> None:
        self.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is none by its bases

    def data_received(self, data: bytes) -> None:
        self._at = self._heard_at = perf_counter()
        self.begun = True
        if self._parser is None or self._answer is None:
            self.abort()  # nobody has asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)  # whoever hears it refuses what it hears
        except httptools.HttpParserError as error:
            self._fail(OSError(f"no answer of HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.keeps = False
        if exc is None and self._to_the_end:
            self.on_message_complete()
        self._fail(ConnectionResetError("the connection was closed before the answer was complete"))

    # the parser's

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called with each header; without one of these an answer ends with its connection."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._delimited = True

    def on_headers_complete(self) -> None:
        """Called when the body may begin."""
        self._to_the_end = not self._delimited

    def on_body(self, data: bytes) -> None:
        """Called with the body bytes of the read at hand."""
        if self._sink is not None:
            self._sink.feed(data, self._at)

    def on_message_complete(self) -> None:
        """Called at the end of the answer."""
        assert self._parser is not None
        self.keeps = self._parser.should_keep_alive()
        if not self.keeps and self._transport is not None:
            self._transport.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._parser.get_status_code())


class Pool:
    """Connections to one endpoint, as many as there are requests in flight."""

    def __init__(self, url: str, key: str = "") -> None:
        """``url`` is http or https; its path goes before each request's. Raises ``ValueError``."""
        split = urlsplit(url)
        if split.scheme not in ("http", "https") or split.hostname is None:
            raise ValueError(f"{url!r} is no URL: expected such as http://127.0.0.1:8080")
        self._tls = ssl.create_default_context() if split.scheme == "https" else None
        self._host = split.hostname
        self._port = split.port or (443 if self._tls else 80)
        self._prefix = split.path.rstrip("/").removesuffix("/v1")
        self._constant = f"host: {split.netloc.rpartition('@')[2]}\r\n"
        if key:
            self._constant += f"authorization: Bearer {key}\r\n"
        self._idle: list[Connection] = []
        self._post = f"content-type: application/json\r\n{self._constant}"

    async def get(self, path: str, sink: Sink) -> int:
        """The status of a GET, whose body goes to ``sink`` as it comes."""
        head = f"GET {self._prefix}{path} HTTP/1.1\r\n{self._constant}\r\n"
        return await self._exchange(head.encode(), sink)

    async def post(self, path: str, body: bytes, sink: Sink) -> int:
        """The status of a POST of JSON, whose answer goes to ``sink`` as it comes."""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._post}content-length: {len(body)}\r\n\r\n"
        return await self._exchange(head.encode() + body, sink)

    def close(self) -> None:
        """Hang up those that nobody uses."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(self, request: bytes, sink: Sink) -> int:
        connection = self._kept() or await self._connect()
        try:
            status = await connection.exchange(request, sink)
        except ConnectionError:
            # A kept one that the server has closed meanwhile says so without a byte.
            if not connection.used or connection.begun:
                raise
            connection = await self._connect()
            status = await connection.exchange(request, sink)
        if connection.open:
            self._idle.append(connection)
        return status

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection
