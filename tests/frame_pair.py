"""Both ends of :mod:`policy.wire.frames` without sockets: a test moves the bytes between them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

from uvicorn.server import ServerState

from gateway.http.frame_client import MOST_RECORDS, FrameChannel, FrameClientConnection, FrameClientStream
from gateway.http.http1_client import ConnectionPool
from policy.wire.frames import FULL_FRAME
from serve.engine.frame_server import FrameServerConnection
from serve.engine.interface import WRITER, ASGIApp, Receive, ResponseWriter, Scope, Send

SECRET = "secret"
# A record without a payload.
SMALLEST_RECORD = 9
EVENTS = [(b"content-type", b"text/event-stream")]


class TcpSocket:
    """A socket of which the other side has acknowledged ``acked`` bytes."""

    family = None

    def __init__(self, acked: int) -> None:
        self._acked = acked

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Linux's ``tcp_info``, of which the SYN is one byte."""
        return struct.pack("120xQ24x", self._acked + 1)


class Wire:
    """A transport that keeps what is written until it is taken; beyond ``limit`` bytes it is full.

    ``acked``: what the other side has acknowledged; ``None`` where TCP does not tell.
    """

    def __init__(self, limit: int = 1 << 30, acked: int | None = None) -> None:
        self.limit = limit
        self._sock = None if acked is None else TcpSocket(acked)
        self.written = bytearray()
        self.closed = False
        self.protocol: Any = None
        self._is_full = self._is_gone = False

    def set_protocol(self, protocol: object) -> None:
        self.protocol = protocol

    def get_extra_info(self, name: str) -> TcpSocket | None:
        assert not self._is_gone  # a closed socket cannot be asked
        return self._sock if name == "socket" else None

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data
        if len(self.written) > self.limit and not self._is_full:
            self._is_full = True
            self.protocol.pause_writing()

    def writelines(self, parts: Sequence[bytes | memoryview]) -> None:
        self.write(b"".join(parts))

    def take(self, size: int = 1 << 30) -> bytes:
        """What the network carries of it."""
        data = bytes(self.written[:size])
        del self.written[:size]
        if self._is_full and len(self.written) <= self.limit // 4:
            self._is_full = False
            self.protocol.resume_writing()
        return data

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._lose)

    abort = close

    def _lose(self) -> None:
        self.protocol.connection_lost(None)
        self._is_gone = True

    def pause_reading(self) -> None:
        """It is the test that reads."""

    resume_reading = pause_reading


class Got:
    """A sink that keeps what comes; it may raise ``error``."""

    def __init__(self, error: Exception | None = None) -> None:
        self.head: tuple[int, dict[bytes, bytes]] | None = None
        self.body = b""
        self.parts: list[bytes] = []
        self.complete = False
        self.stale: bool | None = None
        self._error = error

    @property
    def lost(self) -> bool:
        return self.stale is not None

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        assert self.head is None
        self.head = (status, headers)

    def on_data(self, data: bytes, *, complete: bool) -> None:
        assert self.head is not None and not self.complete and not self.lost
        self.body += data
        self.parts.append(data)
        self.complete = complete
        if self._error is not None:
            raise self._error

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        raise AssertionError("frames have no chunks")

    def on_lost(self, *, stale: bool) -> None:
        assert not (self.complete or self.lost)
        self.stale = stale


class Client:
    """The gateway's end; ``wire`` has what it sends."""

    def __init__(self, limit: int = 1 << 30, acked: int | None = None) -> None:
        self.wire = Wire(limit, acked)
        self.channel = FrameChannel(ConnectionPool("http://replica:1", 1.0), SECRET)
        self.connection = FrameClientConnection(self.channel, SECRET)
        self.wire.set_protocol(self.connection)
        self.connection.connection_made(cast("asyncio.Transport", self.wire))

    def ask(
        self, body: bytes | Sequence[bytes] = b"", sink: Got | None = None
    ) -> tuple[FrameClientStream, Got]:
        size = len(body) if isinstance(body, bytes) else sum(map(len, body))
        got = sink or Got()
        stream = FrameClientStream(self.connection)
        stream.send(got, b"POST /v1/x?a=b HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size, body)
        return stream, got

    def receive(self, data: bytes) -> None:
        """Have the connection take all of what arrived, as its reader does over several turns."""
        self.connection.data_received(data)
        # It may complete a frame.
        for _ in range((FULL_FRAME + len(data)) // (SMALLEST_RECORD * MOST_RECORDS)):
            self.connection.data_received(b"")


class Pair(Client):
    """Both ends; requests are served by ``app``."""

    def __init__(self, app: ASGIApp, limit: int = 1 << 30, there: int = 1 << 30) -> None:
        super().__init__(limit)
        self.back = Wire(there)
        self.state = ServerState()
        self.server = FrameServerConnection(app, SECRET, cast("asyncio.Transport", self.back), self.state)

    async def settle(self, size: int = 1 << 30) -> None:
        """Turns until nobody has sent anything for some."""
        quiet = 0
        while quiet < 3:
            await self.turn(size=size)
            quiet = 0 if self.wire.written or self.back.written else quiet + 1

    async def turn(self, times: int = 1, size: int = 1 << 30) -> None:
        """Turns of both loops, in each of which ``size`` bytes go each way at most."""
        for _ in range(times):
            for _ in range(3):
                await asyncio.sleep(0)
            if (data := self.wire.take(size)) and not self.back.closed:
                self.server.data_received(data)
            if (data := self.back.take(size)) and not self.wire.closed:
                self.receive(data)
            if self.wire.closed or self.back.closed:
                self.wire.close()
                self.back.close()
        await asyncio.sleep(0)


def written(serve: Callable[[ResponseWriter, bytes], None]) -> ASGIApp:
    """An app that reads the body, has ``serve`` write the response, and waits for its end."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        writer = scope["extensions"][WRITER]
        message = await receive()
        serve(writer, message.get("body", b""))
        while (await receive())["type"] != "http.disconnect":
            pass

    return app
