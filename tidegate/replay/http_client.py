"""A pool of HTTP/1.1 connections that gives the instant of each read.

An asyncio protocol over httptools and not httpx: the work per event of each stream bounds how many streams a
client can keep pace with, and an instant must be that of the read, not that of a task's next turn.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Protocol, cast

from tidegate.replay.http_message import Origin, Response

CONNECT_TIMEOUT_S = 10.0
# Silence after which a request fails; an engine's queue may be long.
SILENT_AFTER_S = 600.0


class Sink(Protocol):
    """Receives a response. Instants are seconds of ``perf_counter``."""

    def sent(self, at: float) -> None:
        """The request was written at ``at``: connecting is no part of its time."""
        ...

    def feed(self, data: bytes, at: float) -> None:
        """A read at ``at`` brought these bytes of the body."""
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
        self._response: Response | None = None
        self._answer: asyncio.Future[int] | None = None
        self._read_at = 0.0

    @property
    def open(self) -> bool:
        """Whether another request can be sent on it."""
        return self.keeps and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, sink: Sink) -> int:
        """Send a request and read its answer; its status. Raises ``OSError`` when the connection breaks."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._answer, self._response, self.begun = loop.create_future(), Response(sink.feed), False
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
            self.used = True

    def abort(self) -> None:
        """Close it at once."""
        self.keeps = False
        if self._transport is not None:
            self._transport.abort()

    def _check_silence(self) -> None:
        quiet_s = perf_counter() - self._read_at
        if quiet_s >= SILENT_AFTER_S:
            self._fail(TimeoutError(f"silent for {quiet_s:.0f} s"))
        elif self._answer is not None:
            asyncio.get_running_loop().call_later(SILENT_AFTER_S - quiet_s, self._check_silence)

    def _fail(self, error: BaseException) -> None:
        self.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _end(self, response: Response) -> None:
        self.keeps = response.keep_alive
        if not self.keeps and self._transport is not None:
            self._transport.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(response.status)

    # asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is none by its bases

    def data_received(self, data: bytes) -> None:
        self._read_at = perf_counter()
        self.begun = True
        response = self._response
        if response is None:
            self.abort()  # there is no request
            return
        try:
            response.read(data, self._read_at)
        except Exception as error:  # noqa: BLE001 - also what the sink raises is the answer's failure
            self._fail(error)
            return
        if response.complete:
            self._end(response)

    def connection_lost(self, exc: Exception | None) -> None:
        self.keeps = False
        if self._response is None:
            return
        try:
            self._response.close()
        except ConnectionResetError as error:
            self._fail(error)
        else:
            self._end(self._response)


class Pool:
    """Connections to one endpoint, as many as there are requests in flight."""

    def __init__(self, url: str, key: str = "") -> None:
        """See :class:`Origin`."""
        self._origin = Origin(url, key)
        self._idle: list[Connection] = []

    async def get(self, path: str, sink: Sink) -> int:
        """The status of a GET, whose body goes to ``sink`` as it comes."""
        return await self._exchange(self._origin.get(path), sink)

    async def post(self, path: str, body: bytes, sink: Sink) -> int:
        """The status of a POST of JSON, whose answer goes to ``sink`` as it comes."""
        return await self._exchange(self._origin.post(path, body), sink)

    def close(self) -> None:
        """Close the idle connections."""
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
        loop, origin = asyncio.get_running_loop(), self._origin
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(Connection, origin.host, origin.port, ssl=origin.tls)
        return connection
