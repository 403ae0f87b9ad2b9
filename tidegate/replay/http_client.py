"""A pool of HTTP/1.1 connections that gives the instant of each read.

An asyncio protocol over httptools instead of httpx: the CPU time per event limits the number of streams, and
each instant must be that of the read, not of a task's next turn.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools


class HttpOrigin:
    """The server of an http or https URL, and the requests to it."""

    def __init__(self, url: str, key: str = "", headers: Mapping[str, str] | None = None) -> None:
        """The path of ``url``, without ``/v1``, prefixes each request's; ``ValueError`` for another URL."""
        split = urlsplit(url)
        if split.scheme not in ("http", "https") or split.hostname is None:
            raise ValueError(f"{url!r} is no URL: expected such as http://127.0.0.1:8080")
        self.tls = ssl.create_default_context() if split.scheme == "https" else None
        self.host = split.hostname
        self.port = split.port or (443 if self.tls else 80)
        self._prefix = split.path.rstrip("/").removesuffix("/v1")
        self._headers = f"host: {split.netloc.rpartition('@')[2]}\r\n"
        if key:
            self._headers += f"authorization: Bearer {key}\r\n"
        for name, value in (headers or {}).items():
            self._headers += f"{name}: {value}\r\n"
        self._json = f"content-type: application/json\r\n{self._headers}"

    def get(self, path: str) -> bytes:
        return f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()

    def post(self, path: str, body: bytes) -> bytes:
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._json}content-length: {len(body)}\r\n\r\n"
        return head.encode() + body


class ReplayResponse:
    """One response, read by read.

    ``feed`` gets the body bytes of each read with its instant. ``keep_alive`` says, once the response is
    ``complete``, whether the connection can be used again.
    """

    def __init__(self, feed: Callable[[bytes, float], object]) -> None:
        self.complete = False
        self.keep_alive = False
        self.status = 0
        self._feed = feed
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._has_length = self._until_close = False

    def read(self, data: bytes, at: float) -> None:
        """Take the bytes of one read; raises :class:`OSError` when they are no HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise OSError(f"no answer of HTTP: {error}") from error
        if self._body:
            body = b"".join(self._body)
            self._body.clear()
            self._feed(body, at)

    def close(self) -> None:
        """The server has closed the connection; raises :class:`ConnectionResetError` before the end."""
        if not self.complete and not self._until_close:
            raise ConnectionResetError("the connection was closed before the answer was complete")
        self.complete = True

    # The parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called with each header; a response without one of these ends with its connection."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._until_close = not self._has_length

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Called at the end, before the parser is reset for the next response."""
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()


CONNECT_TIMEOUT_S = 10.0
# Silence after which a request fails; an engine's queue may be long.
SILENT_AFTER_S = 600.0
# A server that has closed an idle connection resets it when a request comes. One that ends it later than this
# had the request, which would be sent twice, and seem to be answered quickly.
STALE_S = 0.1


class ReplayResponseSink(Protocol):
    """Receives a response. Instants are seconds of ``perf_counter``."""

    def sent(self, at: float) -> None:
        """The request was written at ``at``, after connecting."""
        ...

    def feed(self, data: bytes, at: float) -> None:
        """A read at ``at`` returned these bytes of the body."""
        ...


class ResponseBody:
    """A body in one piece."""

    def __init__(self) -> None:
        self.body = b""

    def sent(self, at: float) -> None: ...

    def feed(self, data: bytes, at: float) -> None:
        self.body += data


class ReplayConnection(asyncio.Protocol):
    """A connection with one request at a time: ``begun`` once bytes of its answer arrive."""

    def __init__(self) -> None:
        self.begun = False
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._response: ReplayResponse | None = None
        self._answer: asyncio.Future[int] | None = None
        self._read_at = 0.0

    @property
    def open(self) -> bool:
        return self.reusable and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, sink: ReplayResponseSink) -> int:
        """Send a request and read its answer; returns its status. Raises ``OSError``."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._answer, self._response, self.begun = loop.create_future(), ReplayResponse(sink.feed), False
        self._read_at = perf_counter()
        sink.sent(self._read_at)
        self._transport.write(request)
        watch = loop.call_later(SILENT_AFTER_S, self._check_silence)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            watch.cancel()
            self._answer = self._response = None

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def _check_silence(self) -> None:
        silent_s = perf_counter() - self._read_at
        if silent_s >= SILENT_AFTER_S:
            self._fail(TimeoutError(f"silent for {silent_s:.0f} s"))
        elif self._answer is not None:
            asyncio.get_running_loop().call_later(SILENT_AFTER_S - silent_s, self._check_silence)

    def _fail(self, error: BaseException) -> None:
        self.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _end(self, response: ReplayResponse) -> None:
        self.reusable = response.keep_alive
        if not self.reusable and self._transport is not None:
            self._transport.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(response.status)

    # asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._read_at = perf_counter()
        self.begun = True
        response = self._response
        if response is None:
            self.abort()  # no request was sent
            return
        try:
            response.read(data, self._read_at)
        except Exception as error:  # noqa: BLE001 - an error of the sink fails the request, too
            self._fail(error)
            return
        if response.complete:
            self._end(response)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._response is None:
            return
        try:
            self._response.close()
        except ConnectionResetError as error:
            self._fail(error)
        else:
            self._end(self._response)


class ReplayConnectionPool:
    """Connections to one endpoint, as many as there are requests in flight."""

    def __init__(self, url: str, key: str = "", headers: Mapping[str, str] | None = None) -> None:
        self._origin = HttpOrigin(url, key, headers)
        self._idle: list[ReplayConnection] = []

    async def get(self, path: str, sink: ReplayResponseSink) -> int:
        return await self._exchange(self._origin.get(path), sink)

    async def post(self, path: str, body: bytes, sink: ReplayResponseSink) -> int:
        return await self._exchange(self._origin.post(path, body), sink)

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(self, request: bytes, sink: ReplayResponseSink) -> int:
        kept = self._idle_connection()
        connection = kept or await self._connect()
        began = perf_counter()
        try:
            status = await connection.exchange(request, sink)
        except ConnectionError:
            if kept is None or connection.begun or perf_counter() - began > STALE_S:
                raise
            connection = await self._connect()
            status = await connection.exchange(request, sink)
        if connection.open:
            self._idle.append(connection)
        return status

    def _idle_connection(self) -> ReplayConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> ReplayConnection:
        loop, origin = asyncio.get_running_loop(), self._origin
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(
                ReplayConnection, origin.host, origin.port, ssl=origin.tls
            )
        return connection
