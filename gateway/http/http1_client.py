"""HTTP/1.1 client: pooled keep-alive connections on uvloop, parsed by httptools.

Data goes to the client by callback in the same turn of the event loop. httpx takes 3 ms a request, twenty
times the budget.

This module is over 400 lines: the state of a connection decides what each read and each end of it means.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from gateway.http.read_turns import PARSED_BYTES, READ_BYTES, PacedReader, read_turns
from gateway.http.tcp_info import acknowledged, round_trip_s

MAX_IDLE = 256
MAX_BUFFERED_WRITE = 64 * 1024
# Of a large request over TLS, written in one turn of the event loop: a millisecond of encryption.
TLS_SLICE = 256 * 1024
# Bytes that may come before the end of a response's head, interim responses included.
MAX_HEAD = 256 * 1024
# Maximum digits of a chunk size; no read is that large.
MAX_SIZE_LINE = 7
# Errors of connect() that mean that this machine, not the server, lacks a resource.
LOCAL_FAULTS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.ENOSPC, errno.EDQUOT}
)


class ResponseSink(Protocol):
    """The receiver of a response. No call follows ``complete`` or ``on_lost``."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """The head; header names are lower case, the last one of repeated headers is used."""

    def on_data(self, data: bytes, *, complete: bool) -> None:
        """Body bytes of one read, joined; the last call has ``complete``."""

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        """:meth:`on_data` for a read that is exactly one chunk; ``framed`` is the raw chunk."""

    def on_lost(self, *, stale: bool) -> None:
        """The connection broke; ``stale``: the server closed a kept one before the request arrived."""


class UpstreamConnection(Protocol):
    """A way for one request to a server, and for its response to the sink, which may pause and abort it.

    ``received`` is set by every read.
    """

    received: bool

    def send(self, sink: ResponseSink, head: bytes, body: bytes | Sequence[bytes | memoryview]) -> None:
        """Send a request, whose response goes to ``sink``."""

    def pause(self, sink: ResponseSink) -> None:
        """Stop reading: the client reads too slowly."""

    def resume(self, sink: ResponseSink) -> None:
        """Read on."""

    def abort(self, sink: ResponseSink) -> None:
        """The rest of the response is not wanted."""


class ProxiedConnection(UpstreamConnection, Protocol):
    """The way of a request that another proxy sends: to one server, once."""

    def allowed(self, urls: Mapping[str, str]) -> frozenset[str] | None:
        """Of the servers ``urls`` by id those that it may be sent to; ``None`` for all.

        Raises :class:`gateway.protocol.errors.Refused` if it may be sent to none.
        """

    def to(self, url: str) -> None:
        """Send it to the server at ``url``."""

    def body_checked(self) -> None:
        """The body is checked, or will not be: it is no upload any more. May be called again."""


class Http1ClientConnection:
    """One connection, one response at a time. An asyncio protocol that inherits nothing, to be compiled.

    Its sink may pause, resume and abort it until the end of its response; later calls do nothing, since the
    connection may serve another. Every read sets ``received``.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._parser: httptools.HttpResponseParser | None = None
        self._transport: asyncio.Transport | None = None
        self._sink: ResponseSink | None = None
        # It holds this connection, which releases it when it is lost.
        self._reader: PacedReader | None = None
        self.reused = False
        self.received = False
        self._sent = self._sent_before = 0
        self._is_tls = self._has_ended = False
        self._full = False
        self._reset()

    def _reset(self) -> None:
        self._begun = self._in_body = False
        # Slices of the request that are not written yet.
        self._unwritten: deque[memoryview] = deque()
        self._head_size = 0
        self._chunks: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._complete = self._extra = self._keep = self._until_eof = self._interim = self._between = False

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._has_ended and not self._transport.is_closing()

    def send(self, sink: ResponseSink, head: bytes, body: bytes | Sequence[bytes | memoryview]) -> None:
        """Write a request, without copying a large body, in one system call; TLS takes a large one in slices.

        The response goes to ``sink``.
        """
        assert self._transport is not None
        assert self._sink is None
        self._reset()
        self._sink = sink
        parts = (head, body) if isinstance(body, bytes) else (head, *body)
        size = sum(map(len, parts))
        # Of TLS it is not known how many bytes are sent.
        self._sent_before = acknowledged(self._transport) if self._is_tls and self.reused else self._sent
        self._sent += size
        if size <= MAX_BUFFERED_WRITE:
            self._transport.write(b"".join(parts))
        elif not self._is_tls:
            self._transport.writelines(parts)
        else:
            for part in parts:
                view = memoryview(part)
                self._unwritten += [view[at : at + TLS_SLICE] for at in range(0, len(view), TLS_SLICE)]
            self._write_on()

    def pause(self, sink: ResponseSink) -> None:
        """Stop reading: the client reads too slowly."""
        if self._sink is sink and self._reader is not None:
            self._reader.pause()

    def resume(self, sink: ResponseSink) -> None:
        if self._sink is sink and self._reader is not None:
            self._reader.resume()

    def abort(self, sink: ResponseSink) -> None:
        """Close immediately: the replica sees the disconnect and frees the slot."""
        if self._sink is sink:
            self.kill()

    def kill(self) -> None:
        """Close immediately, without a call to the sink."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def release(self) -> None:
        """Forget what holds this connection: given up while it was opened, it is not told of its end."""
        self._parser = self._reader = self._transport = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface without being a subclass.
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)
        self._reader = PacedReader(self._transport, self.data_received)
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        assert self._reader is not None
        has_length = self._in_body and b"content-length" in self._headers
        return self._reader.buffer(READ_BYTES if has_length else PARSED_BYTES)

    def buffer_updated(self, nbytes: int) -> None:
        if self._reader is not None:
            self._reader.updated(nbytes)

    def data_received(self, data: bytes) -> None:
        sink = self._taker()
        if sink is None:  # unsolicited bytes
            self.kill()
            return
        self._begun = self.received = True
        self._pool.reads += 1
        # An engine writes each event as one chunk, which is recognized without the parser and relayed as is.
        if self._between and (chunk := encode_chunk(data)) is not None:
            sink.on_chunk(chunk, data)
            return
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail()
            return
        if not self._in_body:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self._fail()
                return
        # Otherwise the parser may hold the beginning of the next chunk size.
        self._between = self._between and data[-2:] == b"\r\n"
        sink = self._taker()
        if sink is None:  # the sink aborted on the head
            return
        chunks, self._chunks = self._chunks, []
        if self._complete:
            body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self._sink = None
            self._release()
            sink.on_data(body, complete=True)
        elif chunks:
            sink.on_data(chunks[0] if len(chunks) == 1 else b"".join(chunks), complete=False)

    def eof_received(self) -> bool:
        """The server sends no more: the connection closes, in a later turn where hundreds do."""
        self._has_ended = True
        if self._is_tls or self._transport is None:
            return False
        read_turns().close(self._transport)
        return True

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._write_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.discard(self)
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        self._parser = None  # it holds this connection
        sink = self._sink
        if sink is None:
            return
        if self._until_eof and exc is None:
            self._sink = None
            sink.on_data(b"", complete=True)
        else:
            # After EPIPE too the server's FIN came first; after a reset it is not known what had arrived.
            closed = exc is None or isinstance(exc, BrokenPipeError)
            stale = self.reused and not self._begun and closed and not self._has_arrived()
            read_turns().lose(partial(self._lose, stale))

    def _lose(self, stale: bool) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:  # it has not left in the meantime
            sink.on_lost(stale=stale)

    def _taker(self) -> ResponseSink | None:
        """The sink, read by a call: a type checker assumes that the parser changes no attribute."""
        return self._sink

    def _has_arrived(self) -> bool:
        """Whether the server's FIN acknowledged a part of the last request; true if that is unknown."""
        acked = acknowledged(self._transport)
        return acked < 0 or acked != self._sent_before

    def round_trip_s(self) -> float:
        """The smallest round trip to the server in some minutes; 0 where TCP does not tell."""
        return round_trip_s(self._transport)

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            self._extra = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers are not used
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            self._interim = True
            return
        self._in_body = True
        headers = self._headers
        self._until_eof = (
            b"content-length" not in headers and b"transfer-encoding" not in headers and status != 204
        )
        if self._sink is not None and not self._extra:
            self._sink.on_head(status, headers)

    def on_body(self, body: bytes) -> None:
        if not self._extra:
            self._chunks.append(body)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        self._between = False
        if self._interim:
            self._interim = False
            self._headers = {}
            return
        self._complete = True
        assert self._parser is not None
        self._keep = self._parser.should_keep_alive()

    def _write_on(self) -> None:
        """Write the next slice, and the others after it as far as they are taken."""
        if self._unwritten and not self._full and self.alive:
            assert self._transport is not None
            self._transport.write(self._unwritten.popleft())
            asyncio.get_running_loop().call_soon(self._write_on)

    def _release(self) -> None:
        if self._keep and not (self._extra or self._unwritten) and self.alive:
            if self._reader is not None:
                self._reader.resume()
            self.reused = True
            self._pool.give(self)
        elif self._transport is not None:
            self._transport.close()

    def _fail(self) -> None:
        sink = self._sink
        self.kill()
        if sink is not None:
            sink.on_lost(stale=False)


def client_tls_context(ca_file: str | None, changed_ns: int) -> ssl.SSLContext:
    """For calls to servers whose certificates are those of a file, which was changed then, or the system's.

    To read them takes tens of milliseconds, so it is called in a thread. Raises ``OSError``.
    """
    return _client_tls_context(ca_file, changed_ns, None if ca_file else ssl.get_default_verify_paths())


@lru_cache(maxsize=64)
def _client_tls_context(ca_file: str | None, changed_ns: int, system: object) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


class ConnectionPool:
    """Connections to one server, with TLS and a verified certificate if its URL is https.

    ``reads`` counts how often any of them brought bytes.
    """

    def __init__(self, url: str, connect_timeout_s: float, *, max_idle: int = MAX_IDLE) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or "127.0.0.1"
        self._secure = parts.scheme == "https"
        self._ca_file: str | None = None
        self._ca_changed_ns = 0
        self._tls: ssl.SSLContext | None = None
        self.port = parts.port or (443 if self._secure else 80)
        self.host_header = parts.netloc.rpartition("@")[2].encode()
        self.connect_timeout_s = connect_timeout_s
        self._max_idle = max_idle
        self._idle: list[Http1ClientConnection] = []
        self._closed = False
        self.reads = 0

    def take(self) -> Http1ClientConnection | None:
        """The most recently used idle connection, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        return None

    async def connect(self) -> Http1ClientConnection:
        """A new connection; raises ``OSError``, which includes ``TimeoutError`` and ``ssl.SSLError``."""
        loop = asyncio.get_running_loop()
        tls = self._tls
        if self._secure and tls is None:
            wanted = self._ca_file, self._ca_changed_ns
            tls = await asyncio.to_thread(client_tls_context, *wanted)
            if wanted == (self._ca_file, self._ca_changed_ns):
                self._tls = tls
        connection, is_open = Http1ClientConnection(self), False
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                await loop.create_connection(
                    cast("Callable[[], asyncio.Protocol]", lambda: connection),
                    self.host,
                    self.port,
                    ssl=tls,
                )
            is_open = True
        finally:
            if not is_open:
                connection.release()
        return connection

    def give(self, connection: Http1ClientConnection) -> None:
        """Keep ``connection`` for the next request."""
        if self._closed or len(self._idle) >= self._max_idle:
            connection.kill()
        else:
            self._idle.append(connection)

    def round_trip_s(self) -> float:
        """That of the most recently used idle connection; 0 if it is not known."""
        return self._idle[-1].round_trip_s() if self._idle else 0.0

    def discard(self, connection: Http1ClientConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def trust(self, ca_file: str | None, changed_ns: int) -> None:
        """Verify certificates with those in ``ca_file`` (``None``: the system's), on new connections.

        It is read again when ``changed_ns``, the time of its last change, is another.
        """
        if ca_file != self._ca_file or changed_ns != self._ca_changed_ns:
            self._ca_file, self._ca_changed_ns, self._tls = ca_file, changed_ns, None
            self._drop_idle()

    def keep_idle(self, most: int) -> None:
        """Keep at most ``most`` idle connections."""
        self._max_idle = most
        if not most:
            self._drop_idle()

    def close(self) -> None:
        """Close idle connections and keep no more; requests in flight continue."""
        self._closed = True
        self._drop_idle()

    def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.kill()


def encode_chunk(data: bytes) -> bytes | None:
    """The content of ``data`` if it is exactly one chunk, without extensions and not the last."""
    size = at = 0
    for digit in data[:MAX_SIZE_LINE]:
        if 48 <= digit <= 57:
            size = size * 16 + digit - 48
        elif 97 <= digit <= 102 or 65 <= digit <= 70:
            size = size * 16 + (digit & 15) + 9
        else:
            break
        at += 1
    if not size or at + size + 4 != len(data) or data[at : at + 2] != b"\r\n" or data[-2:] != b"\r\n":
        return None
    return data[at + 2 : -2]


def is_local_fault(error: BaseException | None) -> bool:
    """Whether a cause of ``error`` is a resource that this machine lacks."""
    return any(isinstance(each, OSError) and each.errno in LOCAL_FAULTS for each in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what caused it; of a group, the causes of all its errors."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from causes(each)
        error = error.__cause__ or error.__context__
