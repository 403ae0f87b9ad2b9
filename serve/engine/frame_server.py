"""The replica's end of :mod:`policy.wire.frames`."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from uvicorn.server import ServerState

from policy.wire import frames
from policy.wire.frames import BrokenFrames, FrameDecoder, FrameEncoder
from serve.engine.interface import WRITER, ASGIApp, Message, Scope

# A response whose client does not read is kept up to this size beyond its window; then it is cut.
MAX_KEPT: Final = 4 * 1024 * 1024

log = logging.getLogger("tidegate.engine")


class FrameServerConnection:
    """A gateway worker's connection. What all its streams write in a turn of the loop leaves in one frame.

    An asyncio protocol that inherits nothing, to be compiled.
    """

    def __init__(
        self, app: ASGIApp, secret: str, transport: asyncio.Transport, server_state: ServerState
    ) -> None:
        self._app = app
        self._preface = frames.preface(secret)
        self._transport = transport
        self._server_state = server_state
        self._encoder = FrameEncoder()
        self._decoder = FrameDecoder()
        self._opening: bytes | None = b""
        self._streams: dict[int, FrameServerStream] = {}
        self._last = 0
        self._behind: deque[FrameServerStream] = deque()
        self._flushes = self._is_broken = False
        self.is_full = False
        server_state.connections.add(self)  # type: ignore[arg-type] # it has the methods that uvicorn calls
        transport.set_protocol(cast("asyncio.Protocol", self))

    def data_received(self, data: bytes) -> None:
        if self._is_broken:
            return
        try:
            if self._opening is not None:
                data = self._opened(self._opening + data)
            for kind, number, payload in self._decoder.feed(data):
                self._take(kind, number, payload)
            self._decoder.check()
        except BrokenFrames as error:
            if self._opening is None:  # others than gateways must not fill the log
                log.warning("a gateway's connection is closed: %s", error)
            self._is_broken = True
            self._transport.abort()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._flush_soon()

    def eof_received(self) -> None:
        """Called before the connection closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        streams, self._streams = self._streams, {}
        self._behind.clear()
        for stream in streams.values():
            stream.abort()

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops."""
        if not self._streams:
            self._transport.close()

    # used by streams

    def add(self, kind: int, stream: FrameServerStream, payload: bytes) -> None:
        if self._streams.get(stream.number) is stream:
            self._encoder.add(kind, stream.number, payload)
            if kind in (frames.END, frames.RESET):
                del self._streams[stream.number]
            self._flush_soon()

    def fall_behind(self, stream: FrameServerStream) -> None:
        """Have ``stream`` write what it kept, in its turn."""
        self._behind.append(stream)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushes:
            self._flushes = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        if self._transport.is_closing():
            return
        if not self.is_full:
            # One part of each, so that none delays the others by more.
            for _ in range(len(self._behind)):
                self._behind.popleft().write_on()
        if not self._encoder.empty:
            self._transport.write(self._encoder.take())

    def _opened(self, data: bytes) -> bytes:
        """Take the preface; returns what follows it, once it is whole."""
        line, end, rest = data.partition(b"\r\n")
        if not end:
            self._opening = data
            if len(data) > frames.MAX_PREFACE:
                raise BrokenFrames("its preface has no end")
            return b""
        if not hmac.compare_digest(line + end, self._preface):
            raise BrokenFrames("its version is another, or the internal secret is wrong")
        self._opening = None
        self._transport.write(frames.ACCEPTED)
        return rest

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if kind == frames.REQUEST:
            if number <= self._last:
                raise BrokenFrames(f"stream {number} was opened twice")
            self._last = number
            scope, length = _scope_of(payload)
            stream = self._streams[number] = FrameServerStream(self, number, length)
            task = asyncio.get_running_loop().create_task(stream.run(self._app, scope))
            self._server_state.tasks.add(task)
            task.add_done_callback(self._server_state.tasks.discard)
            return
        if kind not in (frames.BODY, frames.WINDOW, frames.CANCEL):
            raise BrokenFrames(f"a record of kind {kind}")
        if not 0 < number <= self._last:
            raise BrokenFrames(f"stream {number} was never opened")
        allowed = frames.credit_of(payload) if kind == frames.WINDOW else 0
        known = self._streams.get(number)
        if known is None:  # it has ended
            return
        if kind == frames.BODY:
            known.take_body(payload)
        elif kind == frames.WINDOW:
            known.allow(allowed)
        else:
            del self._streams[number]
            known.abort()


class FrameServerStream:
    """One request and its response: ``receive`` and ``send`` of an ASGI app, and a ``ResponseWriter``."""

    def __init__(self, connection: FrameServerConnection, number: int, length: int) -> None:
        self._connection = connection
        self.number = number
        self._missing = length
        self._body: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_read = self._is_gone = self._has_ended = self._has_begun = False
        self._head: bytes | None = None
        self._window = frames.WINDOW_BYTES
        # What the window did not allow yet.
        self._kept = bytearray()
        self._drained: asyncio.Future[None] | None = None
        self._aborted: list[Callable[[], None]] = []

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Serve it by ``app``."""
        scope["extensions"] = {WRITER: self}
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if not self._is_gone:
                log.exception("a request failed")
                if not self._has_begun:
                    self.start(500, [(b"content-type", b"text/plain")])
                    self.end(b"Internal Server Error")
        finally:
            if not self._has_ended:
                # As HTTP's closed connection: whatever came of the response is not whole.
                self._has_ended = True
                self._connection.add(frames.RESET, self, b"")
            self._aborted = []  # they may hold this stream

    # ASGI

    async def receive(self) -> Message:
        """The whole body, then a disconnect when the response is complete or the gateway wants no more."""
        while not self._is_gone and self._missing > 0:
            await self._wait()
        if not (self._is_gone or self._is_read):
            self._is_read = True
            body, self._body = self._body, []
            return {"type": "http.request", "body": b"".join(body), "more_body": False}
        while not (self._is_gone or self._has_ended):
            await self._wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Write a part of the response, and wait while the gateway's window is full."""
        if message["type"] == "http.response.start":
            self.start(message["status"], message["headers"])
            return
        body = message.get("body", b"")
        if message.get("more_body"):
            if body:
                self._add(body)
        else:
            self.end(body)
        while self._kept and not self._is_gone:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    # ResponseWriter

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._head = frames.head(status, headers)
        if len(self._head) > frames.MAX_PAYLOAD:
            raise ValueError(f"a head of {len(self._head)} bytes; expected {frames.MAX_PAYLOAD} at most")
        if self._head.count(b"\r\n") != len(headers):  # the gateway would close the connection of all streams
            raise ValueError("a header with a line break in it")

    def write(self, data: bytes) -> None:
        self._add(data)
        if len(self._kept) > MAX_KEPT and not self._is_gone:
            log.warning("a response is cut: its client left %d bytes unread", len(self._kept))
            self._has_ended = True
            self._kept.clear()
            self._connection.add(frames.RESET, self, b"")
            self.abort()

    def end(self, data: bytes = b"") -> None:
        if self._has_ended or self._is_gone:
            return
        self._has_ended = True
        self._begin()
        if self._kept or len(data) > min(self._window, frames.MAX_PAYLOAD) or self._connection.is_full:
            self._keep(data)
        else:
            self._connection.add(frames.END, self, data)
        self._wake()

    def on_abort(self, callback: Callable[[], None]) -> None:
        if self._is_gone:
            callback()
        else:
            self._aborted.append(callback)

    # used by the connection

    def take_body(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._missing < 0:
            raise BrokenFrames("a body is longer than its head says")
        self._body.append(data)
        if not self._missing:
            self._wake()

    def allow(self, size: int) -> None:
        """The gateway has taken ``size`` bytes."""
        was_closed = self._window <= 0
        self._window += size
        if was_closed and self._kept:
            self._connection.fall_behind(self)

    def write_on(self) -> None:
        """Write a part of what was kept."""
        size = min(len(self._kept), self._window, frames.MAX_PAYLOAD)
        if size <= 0 < len(self._kept):
            return
        part = bytes(self._kept[:size])
        del self._kept[:size]
        self._window -= size
        if self._kept:
            self._connection.add(frames.DATA, self, part)
            if self._window > 0:
                self._connection.fall_behind(self)
            return
        if part or self._has_ended:
            self._connection.add(frames.END if self._has_ended else frames.DATA, self, part)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def abort(self) -> None:
        """The gateway wants no more of it."""
        self._is_gone = True
        self._kept.clear()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._wake()
        callbacks, self._aborted = self._aborted, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # other streams of the connection go on
                log.exception("a request's end could not be told")

    def _add(self, data: bytes) -> None:
        if self._has_ended or self._is_gone:
            return
        self._begin()
        size = len(data)
        if self._kept or size > self._window or size > frames.MAX_PAYLOAD or self._connection.is_full:
            self._keep(data)
        else:
            self._window -= size
            self._connection.add(frames.DATA, self, data)

    def _begin(self) -> None:
        if self._head is not None:
            self._has_begun = True
            head, self._head = self._head, None
            self._connection.add(frames.HEAD, self, head)

    def _keep(self, data: bytes) -> None:
        is_first = not self._kept
        self._kept += data
        if is_first and (self._window > 0 or not data):
            self._connection.fall_behind(self)

    async def _wait(self) -> None:
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._waiter)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _scope_of(head: bytes) -> tuple[Scope, int]:
    """The ASGI scope and the length of the body of a request with this HTTP/1.1 head."""
    line, _, rest = head.partition(b"\r\n")
    try:
        method, target, version = line.decode("ascii").split(" ")
        headers = frames.header_lines(rest)
        length = next((int(value) for name, value in headers if name == b"content-length"), 0)
    except (ValueError, UnicodeDecodeError) as error:
        raise BrokenFrames("a request's head is malformed") from error
    if version != "HTTP/1.1" or length < 0:
        raise BrokenFrames("a request's head is malformed")
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    return scope, length
