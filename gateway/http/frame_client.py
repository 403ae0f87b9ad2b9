"""The gateway's end of :mod:`policy.wire.frames`: one connection to a replica, over which all requests go.

A stream that a slow client holds up stops alone: the replica may send it no more than a window. All streams
end together when the connection is lost, or when the replica does not keep to the format.

This module is over 400 lines: a stream's end and its connection's decide together what a request may do next.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import cast

from gateway.http.http1_client import MAX_IDLE, ConnectionPool, ResponseSink, UpstreamConnection
from gateway.http.read_turns import READ_BYTES, PacedReader
from gateway.http.tcp_info import acknowledged, round_trip_s
from policy.wire import frames
from policy.wire.frames import BrokenFrames, FrameDecoder, FrameEncoder, Record

FRAME_BYTES = frames.FULL_FRAME  # of one read: less than a hundred tokens, which take two milliseconds
# At most of one turn of the event loop: ends of streams have ten bytes, and take 28 us each.
MOST_RECORDS = 100
# After so many bytes of records the others wait for the next turn if the time of this one is spent; a whole
# answer, of which a replica may say what takes long to check, counts for as many.
TIMED_BYTES = FRAME_BYTES // 2
# Streams that learn in one turn that their connection is lost.
MOST_LOST = 64
# Of uploads, in one turn of the event loop.
UPLOAD_BYTES = READ_BYTES
# Stream numbers are 32 bits; on a connection that has used up so many only the load stream goes on.
LAST_STREAM = (1 << 32) - 1


class FrameClientStream:
    """One request on a :class:`FrameClientConnection`, and its response: an ``UpstreamConnection`` for one
    attempt.
    """

    def __init__(self, connection: FrameClientConnection) -> None:
        self._connection = connection
        self.number = 0
        self.sink: ResponseSink | None = None
        self.received = False
        # Whether what comes on it shows that the engine makes progress.
        self.counts = True
        self.begun = False
        self.written_before = 0
        self._unacknowledged = 0
        self._is_paused = False

    def send(self, sink: ResponseSink, head: bytes, body: bytes | Sequence[bytes | memoryview]) -> None:
        """Send a request; small ones leave at the end of this turn, parts of large ones with other frames."""
        assert self.sink is None
        self.sink = sink
        self._connection.open(self, head, body)

    def pause(self, sink: ResponseSink) -> None:
        """The client reads too slowly: the replica may fill its window, and no more."""
        self._is_paused = True

    def resume(self, sink: ResponseSink) -> None:
        self._is_paused = False
        self._acknowledge()

    def abort(self, sink: ResponseSink) -> None:
        """The rest of the response is not wanted: the replica frees the slot."""
        if self.sink is sink:
            self._connection.cancel(self)
            self.sink = None

    def took(self, size: int) -> None:
        """So many bytes of the body were passed on; raises BrokenFrames if the window was smaller."""
        self._unacknowledged += size
        if self._unacknowledged > frames.WINDOW_BYTES:
            raise BrokenFrames(f"{self._unacknowledged} bytes in a window of {frames.WINDOW_BYTES}")
        if not self._is_paused:
            self._acknowledge()

    def _acknowledge(self) -> None:
        if self.sink is not None and self._unacknowledged >= frames.WINDOW_BYTES // 2:
            self._connection.allow(self, self._unacknowledged)
            self._unacknowledged = 0


class FrameClientConnection:
    """An asyncio protocol that inherits nothing, to be compiled.

    ``opened`` yields whether the server speaks frames, and never fails. ``channel`` counts what comes on
    streams that count. ``alive``: new streams may be opened. ``leaving``: it closes with its last stream.
    """

    def __init__(self, channel: FrameChannel, secret: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[bool] = self._loop.create_future()
        self._channel = channel
        self._preface = frames.preface(secret)
        self._answer: bytes | None = b""
        self._transport: asyncio.Transport | None = None
        # It holds this connection, which releases it when it is lost.
        self._reader: PacedReader | None = None
        self._encoder = FrameEncoder()
        self._decoder = FrameDecoder()
        # Those that wait for the next turn.
        self._records: list[Record] = []
        self._streams: dict[int, FrameClientStream] = {}
        self._last = 0
        # Parts of large bodies that are not written yet, by stream, the next to be written first.
        self._uploads: OrderedDict[FrameClientStream, deque[memoryview]] = OrderedDict()
        self._written = 0
        self._is_full = self._flushes = self._is_broken = False
        self.leaving = False

    @property
    def alive(self) -> bool:
        return (
            self._answer is None
            and not self.leaving
            and self._last < LAST_STREAM
            and self._transport is not None
            and not self._transport.is_closing()
        )

    def round_trip_s(self) -> float:
        """The smallest round trip to the server in some minutes; 0 where TCP does not tell."""
        return round_trip_s(self._transport) if self.alive else 0.0  # a closed socket cannot be asked

    def close(self) -> None:
        """Close now; each stream that is open loses its response."""
        if self._transport is not None:
            self._transport.abort()

    def leave(self) -> None:
        """Open no more streams, and close after the last one."""
        self.leaving = True
        self._ended()

    # used by streams

    def open(
        self, stream: FrameClientStream, head: bytes, body: bytes | Sequence[bytes | memoryview]
    ) -> None:
        if self._reader is None:  # it was lost in the meantime
            sink = stream.sink
            assert sink is not None
            stream.sink = None
            self._loop.call_soon(lambda: sink.on_lost(stale=True))
            return
        self._last += 1
        stream.number = self._last
        stream.written_before = self._written
        self._streams[stream.number] = stream
        self._encoder.add(frames.REQUEST, stream.number, head)
        parts = (body,) if isinstance(body, bytes) else body
        if sum(map(len, parts)) <= frames.MAX_PAYLOAD:
            if payload := b"".join(parts):
                self._encoder.add(frames.BODY, stream.number, payload)
        else:
            step = frames.MAX_PAYLOAD
            views = [memoryview(part) for part in parts]
            self._uploads[stream] = deque(
                view[at : at + step] for view in views for at in range(0, len(view), step)
            )
        self._flush_soon()

    def cancel(self, stream: FrameClientStream) -> None:
        if self._streams.get(stream.number) is stream:
            self._encoder.add(frames.CANCEL, stream.number, b"")
            self._flush_soon()
            self._end(stream)

    def allow(self, stream: FrameClientStream, size: int) -> None:
        self._encoder.add(frames.WINDOW, stream.number, frames.credit(size))
        self._flush_soon()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface without being a subclass.
        self._transport = cast("asyncio.Transport", transport)
        self._reader = PacedReader(self._transport, self.data_received)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._write(self._preface)

    def get_buffer(self, sizehint: int) -> memoryview:
        assert self._reader is not None
        return self._reader.buffer(FRAME_BYTES)

    def buffer_updated(self, nbytes: int) -> None:
        if self._reader is not None:
            self._reader.updated(nbytes)

    def data_received(self, data: bytes) -> None:
        if self._receive(data) and self._reader is not None:
            self._reader.fall_behind()

    def _receive(self, data: bytes) -> bool:
        """Take what has come, as far as this turn of the event loop has time; whether there is more."""
        if self._answer is not None:
            data = self._answered(self._answer + data)
        if self._is_broken:
            return False
        records, self._records = self._records, []
        try:
            records += self._decoder.feed(data, MOST_RECORDS - len(records))
            untimed = TIMED_BYTES
            for at, (kind, number, payload) in enumerate(records):
                if untimed <= 0:
                    if self._reader is None or self._reader.is_late():
                        self._records = records[at:]
                        return True
                    untimed = TIMED_BYTES
                untimed -= TIMED_BYTES if kind == frames.END else len(payload)
                try:
                    self._take(kind, number, payload)
                except BrokenFrames:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever breaks in a sink, other streams go on
                    self._sink_failed(number, error)
            self._decoder.check()
        except BrokenFrames as error:
            self._is_broken = True
            _report("a replica's connection is closed", error)
            self.close()
            return False
        return len(records) == MOST_RECORDS

    def eof_received(self) -> None:
        """Called before the connection closes."""

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._flush_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        reader, self._reader = self._reader, None
        self._open_ended(False)
        # After EPIPE too the server's FIN came first; after a reset or a close from here it is not known what
        # arrived.
        closed = exc is None or isinstance(exc, BrokenPipeError)
        acked = acknowledged(self._transport) if closed and not self._is_broken else -1
        self._end_all(b"" if reader is None else reader.release(), acked, closed=closed)

    def _end_all(self, data: bytes, acked: int, *, closed: bool) -> None:
        """Take ``data`` and what else came before the connection was lost, then end the streams."""
        if self._receive(data):
            self._loop.call_soon(lambda: self._end_all(b"", acked, closed=closed))
            return
        streams, self._streams = self._streams, {}
        self._uploads.clear()
        self._lose_some(deque(streams.values()), acked, closed=closed)

    def _lose_some(self, lost: deque[FrameClientStream], acked: int, *, closed: bool) -> None:
        for _ in range(min(MOST_LOST, len(lost))):
            stream = lost.popleft()
            sink, stream.sink = stream.sink, None
            if sink is not None:
                before = stream.written_before
                never_arrived = before == self._written or 0 <= acked <= before
                sink.on_lost(stale=closed and not stream.begun and never_arrived)
        if lost:
            self._loop.call_soon(lambda: self._lose_some(lost, acked, closed=closed))

    def _answered(self, answer: bytes) -> bytes:
        """Take the server's answer to the preface; returns the frames after it."""
        size = len(frames.ACCEPTED)
        if answer[:size] == frames.ACCEPTED:
            self._answer = None
            self._open_ended(True)
            return answer[size:]
        self._answer = answer
        if answer != frames.ACCEPTED[: len(answer)]:
            self.close()
        return b""

    def _end(self, stream: FrameClientStream) -> None:
        del self._streams[stream.number]
        stream.sink = None
        # A replica that does not read must not keep the bodies of requests that are over.
        self._uploads.pop(stream, None)
        self._ended()

    def _ended(self) -> None:
        """A stream has ended. The last one left nothing to send, also where the replica reads no more."""
        if self.leaving and not self._streams:
            self.close()

    def _open_ended(self, speaks: bool) -> None:
        if not self.opened.done():
            self.opened.set_result(speaks)

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if not frames.HEAD <= kind <= frames.RESET:
            raise BrokenFrames(f"a record of kind {kind}")
        if not 0 < number <= self._last:
            raise BrokenFrames(f"stream {number} was never opened")
        stream = self._streams.get(number)
        if stream is None:  # it was cancelled
            return
        sink = stream.sink
        assert sink is not None
        stream.received = True
        if stream.counts:
            self._channel.progress += 1
        if not stream.begun and kind in (frames.DATA, frames.END):
            raise BrokenFrames("a body without a head")
        if kind == frames.DATA:
            sink.on_data(payload, complete=False)
            stream.took(len(payload))
        elif kind == frames.END:
            self._end(stream)
            sink.on_data(payload, complete=True)
        elif kind == frames.HEAD:
            if stream.begun:
                raise BrokenFrames("a response with two heads")
            stream.begun = True
            status, headers = frames.head_of(payload)
            sink.on_head(status, headers)
        else:
            self._end(stream)
            sink.on_lost(stale=False)

    def _sink_failed(self, number: int, error: Exception) -> None:
        _report("a stream's sink failed", error)
        stream = self._streams.get(number)
        if stream is not None and (sink := stream.sink) is not None:
            self.cancel(stream)
            sink.on_lost(stale=False)

    def _flush_soon(self) -> None:
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        if self._transport is None or self._transport.is_closing():
            return
        if not self._encoder.empty:
            self._write(self._encoder.take())
        budget = UPLOAD_BYTES
        parts: list[bytes | memoryview] = []
        while self._uploads and budget > 0 and not self._is_full:
            stream, pieces = self._uploads.popitem(last=False)
            piece = pieces.popleft()
            parts += [self._encoder.alone(frames.BODY, stream.number, len(piece)), piece]
            budget -= len(piece)
            if pieces:
                self._uploads[stream] = pieces
        if parts:
            self._written += sum(map(len, parts))
            self._transport.writelines(parts)
        if self._uploads and not self._is_full:
            self._flush_soon()

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._written += len(data)
        self._transport.write(data)


def _report(message: str, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


class FrameChannel:
    """The multiplexed connection to one replica, which its load stream opens, and opens anew when it is lost.

    ``progress`` counts what came for requests, also on connections that it has left.
    """

    def __init__(self, pool: ConnectionPool, secret: str) -> None:
        self._pool = pool
        self._secret = secret
        self._connection: FrameClientConnection | None = None
        self.progress = 0

    @property
    def host_header(self) -> bytes:
        return self._pool.host_header

    def take(self) -> FrameClientStream | None:
        """A stream for a request; ``None`` without a connection."""
        connection = self._connection
        return FrameClientStream(connection) if connection is not None and connection.alive else None

    async def connect(self) -> UpstreamConnection:
        """A way for the load stream: on a new connection, whose requests it shares.

        Over HTTP where the server does not speak frames. Raises ``OSError``.
        """
        self.leave()
        loop = asyncio.get_running_loop()
        connection = FrameClientConnection(self, self._secret)
        async with asyncio.timeout(self._pool.connect_timeout_s):
            await loop.create_connection(
                cast("Callable[[], asyncio.Protocol]", lambda: connection), self._pool.host, self._pool.port
            )
        try:
            await asyncio.wait({connection.opened}, timeout=self._pool.connect_timeout_s)
        except asyncio.CancelledError:
            connection.close()
            raise
        if connection.opened.done():
            speaks = connection.opened.result()
            # Where requests come here, those of HTTP would serve none again.
            self._pool.keep_idle(0 if speaks else MAX_IDLE)
            if not speaks:
                return await self._pool.connect()
        # A server that says nothing yet may hang: the load stream waits for it as over HTTP.
        self._connection = connection
        stream = FrameClientStream(connection)
        stream.counts = False
        return stream

    def round_trip_s(self) -> float:
        """That of the network to the replica; 0 if it is not known."""
        return 0.0 if self._connection is None else self._connection.round_trip_s()

    def leave(self) -> None:
        """Take no more requests; those in flight end on their connection."""
        if self._connection is not None:
            self._connection.leave()
            self._connection = None
