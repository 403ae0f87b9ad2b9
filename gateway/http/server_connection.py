"""A client connection: requests are parsed as they arrive and served in order.

A long body of known length bypasses the parser, which would copy it.

This module is over 400 lines: the phase of a connection decides what each read, response and timeout means.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from ipaddress import IPv6Address
from typing import Any, Final, NamedTuple, cast
from urllib.parse import unquote

import httptools
from starlette.types import Scope

from gateway.http.asgi_exchange import SENT, AsgiExchange, ClientConnection, id_headers, request_ids
from gateway.http.byte_accumulator import ByteAccumulator
from gateway.http.forwarded import Address, TrustedProxies
from gateway.http.read_turns import CHUNKED_BYTES, PARSED_BYTES, READ_BYTES, PacedReader, read_turns
from gateway.http.tcp_info import acknowledged, has_left
from gateway.http.upload_budget import MIN_RATE, Upload, UploadBudget
from gateway.protocol.errors import Refused
from gateway.protocol.paths import is_anthropic
from policy.errors import Refusal

MAX_HEAD_BYTES: Final = 32 * 1024
MAX_HEADERS: Final = 100
# What a header takes beside its bytes.
HEADER_OVERHEAD: Final = 160
# Longer reads are parsed in pieces: heads one by one, chunked bodies in pieces of this size.
MAX_PIECE: Final = 4096
# Bytes of chunk sizes, extensions and trailers, beyond an eighth of the body: each tiny chunk costs a call.
MAX_FRAMING_BYTES: Final = 1024 * 1024
# Bytes of a rejected request that are read and discarded: closing while the client still sends would reset
# the connection and lose the response.
MAX_DISCARDED: Final = 64 * 1024 * 1024
# A shorter body that the app does not want is read and discarded, so that the connection stays open.
MAX_UNWANTED: Final = 64 * 1024
# Pipelined requests that are read ahead of the current one; then reading pauses.
MAX_AHEAD: Final = 16
MAX_AHEAD_BYTES: Final = 64 * 1024
# Of what a client over TLS has not read; then the app waits.
WRITE_BYTES: Final = 64 * 1024
# RFC 9110, 7.2: a name, an address or an IPv6 address, and a port.
_HOST: Final = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[([0-9A-Fa-f:.]+)\])(?::0*(\d{0,5}))?", re.ASCII)
_MAX_PORT: Final = 65535
# Longer ones are not valid. RFC 1035: a name has 253 bytes at most.
MAX_HOST: Final = 512
# Scopes of longer targets are not kept: 256 of them would take 50 MB.
MAX_KEPT_TARGET: Final = 512
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
_NEVER: Final = float("inf")


class _LostTransport:
    """In place of the transport of a connection that was lost."""

    def is_closing(self) -> bool:
        return True

    def get_extra_info(self, name: str) -> None:
        """It has none."""

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        """It is closed."""

    def abort(self) -> None:
        """It is closed."""


_LOST = cast("asyncio.Transport", _LostTransport())


class ServerTimeouts(NamedTuple):
    """Timeouts of a client connection, in seconds; they are checked by the sweep.

    ``idle_s`` between requests, ``head_s`` for a request head, ``body_s`` for a body, and again for as much
    of it as comes at ``MIN_RATE``, ``stalled_s`` without progress of the response, ``linger_s`` for the
    client to finish sending a rejected request.
    """

    idle_s: float = 75.0
    head_s: float = 10.0
    body_s: float = 20.0
    stalled_s: float = 60.0
    linger_s: float = 5.0


class ServerContext:
    """What the connections of a server share, and what they ask of it and report to it.

    ``now`` is the loop's time at the last sweep, ``date_line`` the header of responses. ``body_limit`` is
    called with each head: how large its body may be. With 0 the app serves it at once, without its body if
    it has one. ``refused`` is called with each refusal before the app, the request's scope if its head was
    read, and its id; ``refusal_headers`` with what was received of the request's headers, for more headers
    of the answer. ``proxies`` may say who the client is.
    """

    now: float
    times: ServerTimeouts
    draining: bool
    date_line: bytes
    uploads: UploadBudget
    proxies: TrustedProxies
    body_limit: Callable[[Scope], int]
    refused: Callable[[Refused, Scope | None, bytes], None]
    refusal_headers: Callable[[dict[bytes, bytes]], list[tuple[bytes, bytes]]]

    @property
    def crowded(self) -> bool:
        """Whether too many connections are being rejected to close them gracefully."""
        raise NotImplementedError

    def admit(self, connection: ServerConnection) -> bool:
        """Whether one more connection can be served."""
        raise NotImplementedError

    def lost(self, connection: ServerConnection) -> None:
        """The connection is closed."""
        raise NotImplementedError

    def observe(self, connection: ServerConnection) -> None:
        """The client of ``connection`` has much to read, which it may not do."""
        raise NotImplementedError

    def serve(self, scope: Scope, exchange: AsgiExchange) -> asyncio.Task[None]:
        """Run the app for a request."""
        raise NotImplementedError

    def cancel(self, exchange: AsgiExchange) -> None:
        """Cancel the task of an exchange."""
        raise NotImplementedError


class ServerConnection(ClientConnection):
    """A connection of the client port; an asyncio protocol that inherits nothing of asyncio, to be compiled.

    ``sent`` is a future while the client reads too slowly, ``deadline`` when the server closes it, on the
    server's clock; never while a request is served.
    """

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._transport: asyncio.Transport
        # They hold this connection, so that it has them from its begin until it is lost.
        self._parser: httptools.HttpRequestParser | None = None
        self._reader: PacedReader | None = None
        self._active: AsgiExchange | None = None
        self._ahead: deque[tuple[Scope, AsgiExchange, int]] = deque()
        self._ahead_bytes = 0
        self._unparsed = b""
        self._body = ByteAccumulator()
        self._refused: Refused | None = None
        self._discarded = 0
        self._unsent = 0
        self._feeding = 0
        self._reading = self._used = self._paused = self._held_back = False
        self._upload: Upload | None = None
        # The other end, and who sends the last request: the same, or whom a trusted proxy names.
        self._peer: Address | None = None
        self._client: Address | None = None
        self._scheme = "http"
        # Over TLS, the bytes of all answers.
        self._written = 0
        self.deadline = _NEVER
        self.ended = False
        self.sent = SENT
        self._reset()

    def _reset(self) -> None:
        self._head_done = self._continue = self._bypass = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._scope: Scope | None = None
        # Of the body: its limit, its length if it is known and not complete, the bytes that have arrived, and
        # how many of them had when the deadline was set.
        self._limit = self._length = self._size = self._on_time = 0
        # Bytes of the message that were given to the parser.
        self._fed = 0

    def drain(self, until: float) -> None:
        """Close an idle connection; one that has not sent its first request yet has time ``until`` then."""
        if self._active is None and not self._reading and not self.ended:
            if self._used:
                self.end()
            else:
                self.deadline = until

    def cancel(self) -> None:
        """Cancel the current request; its client gets an error response."""
        if self._active is not None:
            self._server.cancel(self._active)

    def end(self) -> None:
        """Close when everything is written, or when the client stops reading."""
        self.ended = True
        self._unsent = 0
        self.deadline = self._server.now + self._server.times.stalled_s
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    @property
    def unread(self) -> int:
        """The bytes of answers that the client has not taken; without TLS also not the kernel."""
        if self._scheme == "https":  # whose buffers are not all counted
            return max(0, self._written - self.acknowledged)
        return self._transport.get_write_buffer_size()

    @property
    def acknowledged(self) -> int:
        """The bytes that the client's kernel has taken."""
        return acknowledged(self._transport)

    def sweep(self, now: float) -> None:
        """Close the connection if a timeout has passed; ``now`` is the server's clock."""
        if self.sent is not SENT or self.ended:
            # A slow client gets more time, a stalled one does not.
            unsent = self._transport.get_write_buffer_size()
            if unsent != self._unsent:
                self._unsent = unsent
                self.deadline = now + self._server.times.stalled_s
        # A connection that is not read does not show that its client has left.
        if (self._held_back or self._paused) and has_left(self._transport):
            self._transport.abort()
            return
        if self.deadline > now:
            return
        if self._reading and not self.ended:
            body_s = self._server.times.body_s
            if self._head_done and self._size - self._on_time >= MIN_RATE * body_s:
                self._on_time = self._size
                self.deadline = now + body_s
                return
            self._refuse(Refused(Refusal.TOO_SLOW, "The request took too long to arrive."))
        else:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface without being a subclass.
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)
        peer = transport.get_extra_info("peername")
        self._peer = self._client = (peer[0], peer[1]) if isinstance(peer, tuple) else None
        self._reader = PacedReader(self._transport, self.data_received, self._peer[0] if self._peer else "-")
        if transport.get_extra_info("ssl_object") is not None:
            self._scheme = "https"
            # As without TLS: what a client has not read is held twice otherwise.
            self._transport.set_write_buffer_limits(WRITE_BYTES)
        self.deadline = self._server.now + self._server.times.idle_s
        if not self._server.admit(self):
            self._refuse(Refused(Refusal.BUSY, "Too many connections are open."))
            if self._server.crowded:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.lost(self)
        self.ended = True
        self.resume_writing()
        self._ahead.clear()
        self._ahead_bytes = 0
        self._release()
        if self._upload is not None:
            self._server.uploads.end(self._upload)
            self._upload = None
        self._refused = self._parser = self._scope = None
        self._transport = _LOST  # one with TLS keeps this connection
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        active, self._active = self._active, None
        if active is not None and not active.done:
            active.disconnect()
            read_turns().lose(partial(self._server.cancel, active))

    def pause_writing(self) -> None:
        self.sent = asyncio.get_running_loop().create_future()
        self._server.observe(self)
        self._unsent = 0
        self.deadline = self._server.now + self._server.times.stalled_s

    def resume_writing(self) -> None:
        waiting, self.sent = self.sent, SENT
        if isinstance(waiting, asyncio.Future) and not waiting.done():
            waiting.set_result(None)
        if not self.ended:
            self._set_deadline()
            if self._active is None:
                self._next()

    def eof_received(self) -> bool:
        """The client sends no more: the connection closes, one over TLS at once."""
        if self._transport.get_extra_info("ssl_object") is not None:
            return False
        read_turns().close(self._transport)
        return True

    def get_buffer(self, sizehint: int) -> memoryview:
        assert self._reader is not None
        if self._length:
            return self._reader.buffer(READ_BYTES if self._upload is None else self._upload.read_size())
        return self._reader.buffer(CHUNKED_BYTES if self._reading and self._head_done else PARSED_BYTES)

    def buffer_updated(self, nbytes: int) -> None:
        if self._reader is not None:
            self._reader.updated(nbytes)

    def data_received(self, data: bytes) -> None:
        if self.ended or self._fault() is not None:
            self._discard(len(data))
        else:
            self._take(data)

    def _fault(self) -> Refused | None:
        """The refusal, read by a call: a type checker assumes that the parser changes no attribute."""
        return self._refused

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._reset()
        self._reading = self._used = True
        if self._active is None:
            self.deadline = self._server.now + self._server.times.head_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are ignored, and the head is refused when it is complete if it has too many.
        if not self._head_done and len(self._headers) <= MAX_HEADERS:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        assert parser is not None
        self._head_done = True
        self._method = parser.get_method()
        self._http_1_1 = parser.get_http_version() == "1.1"
        self._keep_alive = parser.should_keep_alive()
        if len(headers) > MAX_HEADERS or (
            self._fed + self._feeding > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES
        ):
            self._refused = _head_too_large()
            return
        length = hosts = 0
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"host":
                hosts += 1 if len(value) <= MAX_HOST and _is_host(value) else 2
            elif name == b"expect" and value.lower() == b"100-continue" and self._http_1_1:
                self._continue = True
        if hosts > 1 or (not hosts and self._http_1_1):
            self._refused = Refused(Refusal.BAD_REQUEST, "A request needs one valid Host header.")
            return
        try:
            scope_of = _scope if len(self._url) <= MAX_KEPT_TARGET else _scope.__wrapped__
            scope: Scope = {**scope_of(self._url, self._method, self._http_1_1), "headers": headers}
            scope["client"], scope["scheme"] = self._sender(headers)
        except ValueError:
            self._refused = Refused(Refusal.BAD_REQUEST, "The request's target is not valid.")
            return
        self._scope = scope
        self._length = length
        self._limit = self._server.body_limit(scope)
        if not self._limit:
            self._serve_without_body()
        elif length > self._limit:
            self._refused = self._too_large()
        else:
            if self._active is None:
                self.deadline = self._server.now + self._server.times.body_s
            if self._continue:
                self._send_continue()

    def _sender(self, headers: list[tuple[bytes, bytes]]) -> tuple[Address | None, str]:
        """The client's address and scheme, by a trusted proxy where one sends the request."""
        client, scheme = self._peer, self._scheme
        if (proxies := self._server.proxies).trusted:
            client, scheme = proxies.sender(client, scheme, headers)
        if client != self._client:
            self._client = client
            if self._upload is not None:  # counted to the proxy until now
                self._server.uploads.end(self._upload)
                self._upload = None
        return client, scheme

    def on_body(self, body: bytes) -> None:
        if self._refused is not None:
            return
        if not self._limit:
            self._size += len(body)
            return
        self._keep(body)
        if self._size > self._limit:
            self._refused = self._too_large()

    def on_message_complete(self) -> None:
        if self._parser is not None and self._parser.should_upgrade():
            return
        if self._refused is None:
            self._complete()

    # reading

    def _take(self, data: bytes) -> None:
        """Take what has arrived: requests up to as many as are read ahead, and the rest unparsed."""
        at = 0
        if len(data) <= MAX_PIECE and not self._length and not self._ahead:  # as most requests arrive
            at = self._parse(data)
        while at < len(data) and self._fault() is None:
            if self._length and (self._bypass or self._length - self._size > len(data) - at):
                at = self._take_body(data, at)
            elif self._is_ahead():
                self._unparsed = data[at:]
                break
            else:
                at += self._parse(memoryview(data)[at : self._end_of_piece(data, at)])
        if (refused := self._fault()) is not None:
            self._discard(len(data) - at)
            self._refuse(refused)
        if self._reading or self._ahead or self._paused or self._upload is not None:
            self._settle()

    def _end_of_piece(self, data: bytes, at: int) -> int:
        """The end of the piece of ``data`` from ``at`` that is parsed at once."""
        end = at + MAX_PIECE
        if end >= len(data):
            return len(data)
        if self._length:
            return at + self._length - self._size
        # Before a head the parser skips line ends, of which there may be many.
        if not (self._reading and self._head_done) and data[at] > 13:
            # A head alone: what follows may be a long body, or more requests than are read ahead.
            after = data.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES) + 4
            return after if after > at else end
        return end

    def _parse(self, piece: bytes | memoryview) -> int:
        """Returns how much was parsed: less only at an upgrade."""
        assert self._parser is not None
        self._feeding = len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as stopped:
            self._ignore_upgrade()
            taken: int = stopped.args[0]
            return taken
        except httptools.HttpParserError:
            self._refused = self._fault() or Refused(Refusal.BAD_REQUEST, "The request is not valid HTTP.")
            return len(piece)
        if self._reading:
            self._fed += len(piece)
            self._check_overhead()
        return len(piece)

    def _check_overhead(self) -> None:
        """Refuse an endless head, and a body of which too much is framing."""
        if self._refused is not None:
            return
        # The piece in which a message began may have had others before it.
        overhead = self._fed - self._size - MAX_PIECE
        if not self._head_done:
            if overhead > MAX_HEAD_BYTES:
                self._refused = _head_too_large()
        elif overhead > MAX_HEAD_BYTES + MAX_FRAMING_BYTES + self._size // 8:
            self._refused = Refused(Refusal.BAD_REQUEST, "The chunks of the body are too small.")

    def _ignore_upgrade(self) -> None:
        """Serve a request that offers an upgrade (often h2c) as HTTP/1.1; the parser has read its head."""
        self._parser = httptools.HttpRequestParser(self)
        self._bypass = True
        if self._refused is None:
            if self._is_chunked():
                self._refused = Refused(Refusal.BAD_REQUEST, "This port only speaks HTTP/1.1.")
            elif not self._length:
                self._complete()

    def _take_body(self, data: bytes, at: int) -> int:
        """Add data from ``at`` to a body of known length; returns where the next request begins."""
        self._bypass = True
        end = min(len(data), at + self._length - self._size)
        if self._limit:
            self._keep(data[at:end])
        else:
            self._size += end - at
        if self._size == self._length:
            self._parser = httptools.HttpRequestParser(self)
            self._complete()
        return end

    def _keep(self, part: bytes) -> None:
        """Add a part of a body."""
        self._size += len(part)
        self._body.add(part, self._length)

    def _serve_without_body(self) -> None:
        """Serve a request whose body, if it has one, the app does not want."""
        if self._length > MAX_UNWANTED or self._continue or self._is_chunked():
            self._keep_alive = self._continue = False
        self._serve(b"")

    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self._headers)

    def _complete(self) -> None:
        self._reading = False
        self._length = 0
        if not self._limit:
            if self._active is None:
                self._next()
            return
        self._serve(self._body.take())

    def _serve(self, body: bytes) -> None:
        """Serve a request now or, if another one is served, after it."""
        exchange = AsgiExchange(
            self, body, keep=self._keep_alive, http_1_1=self._http_1_1, headless=self._method == b"HEAD"
        )
        scope, self._scope = self._scope, None
        assert scope is not None
        scope["tidegate.exchange"] = exchange
        if self._active is None and self.sent is SENT:
            self._start(scope, exchange)
            return
        size = self._head_bytes() + HEADER_OVERHEAD * len(self._headers) + len(body)
        self._ahead.append((scope, exchange, size))
        self._ahead_bytes += size

    def _head_bytes(self) -> int:
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def _release(self) -> None:
        """Forget what was received of requests that will not be served."""
        self._unparsed = b""
        self._body.clear()

    def _is_ahead(self) -> bool:
        """Whether as much is read ahead of the current request as may be."""
        return len(self._ahead) >= MAX_AHEAD or self._ahead_bytes > MAX_AHEAD_BYTES

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > MAX_DISCARDED:
            self._transport.abort()

    def _settle(self) -> None:
        """Report what is held, and read on unless it is enough."""
        held, left = self._ahead_bytes + len(self._unparsed), 0
        if self._reading and self._refused is None and not self.ended:
            if not self._head_done:
                held, left = held + self._fed + HEADER_OVERHEAD * len(self._headers), MAX_HEAD_BYTES
            elif self._limit:
                held, left = held + self._size, (self._length or self._limit) - self._size
        uploads = self._server.uploads
        if held:
            if self._upload is None:
                self._upload = uploads.begin(self, self._client)
            uploads.hold(self._upload, held, left)
        elif self._upload is not None:
            uploads.end(self._upload)
            self._upload = None
            if self._held_back:
                self.read_on()
        self._pause_or_resume()

    def hold_back(self) -> None:
        """Stop reading until :meth:`read_on`: other clients' requests are completed first."""
        self._held_back = True
        self._set_deadline()
        self._pause_or_resume()

    def read_on(self) -> None:
        self._held_back = False
        self._set_deadline()
        self._pause_or_resume()

    def shed(self, refused: Refused) -> None:
        """Refuse all requests that are not served yet, and forget what was received of them."""
        self._upload = None
        self._ahead.clear()
        self._ahead_bytes = 0
        self._refuse(refused)

    def _pause_or_resume(self) -> None:
        paused = False
        if self._refused is None and not self.ended:
            paused = self._held_back or bool(self._unparsed) or self._is_ahead()
            if self._active is not None and self._reading and self._limit:
                paused = paused or self._size > MAX_AHEAD_BYTES
        if paused is not self._paused:
            self._paused = paused
            if self._reader is None:
                pass
            elif paused:
                self._reader.pause()
            else:
                self._reader.resume()

    # serving

    def _start(self, scope: Scope, exchange: AsgiExchange) -> None:
        self._active = exchange
        self.deadline = _NEVER
        if exchange.size > MAX_AHEAD_BYTES:
            exchange.count_body(self._server.uploads, scope["client"])
        exchange.task = self._server.serve(scope, exchange)

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if self._scheme == "https":
            self._written += len(data)
            if len(data) > WRITE_BYTES:  # which TLS hands on at once, and does not pause for
                self._server.observe(self)

    @property
    def draining(self) -> bool:
        return self._server.draining

    def general_header(self) -> bytes:
        return self._server.date_line

    def answered(self, exchange: AsgiExchange) -> None:
        if exchange is not self._active:
            return
        self._active = None
        if not exchange.keep:
            if self._reading:
                self._linger()
            else:
                self.end()
        elif self.sent is SENT:
            self._next()

    def _next(self) -> None:
        if not self._ahead and self._unparsed:
            data, self._unparsed = self._unparsed, b""
            self._take(data)
            if self._active is not None:
                return
        if self._ahead:
            scope, exchange, size = self._ahead.popleft()
            self._ahead_bytes -= size
            self._start(scope, exchange)
            if self._paused or self._upload is not None:
                self._settle()
        elif self._refused is not None:
            self._refuse(self._refused)
        elif self._server.draining and not self._reading:
            self.end()
        else:
            self._set_deadline()
            self._send_continue()
            if self._paused:
                self._settle()

    def _send_continue(self) -> None:
        """Send 100 Continue to a client that expects it, when its request is the current one."""
        if self._continue and self._active is None and self._reading:
            self._continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _set_deadline(self) -> None:
        times = self._server.times
        self._on_time = self._size
        if self._active is not None or self._held_back:
            self.deadline = _NEVER
        elif not self._reading:
            self.deadline = self._server.now + times.idle_s
        else:
            self.deadline = self._server.now + (times.body_s if self._head_done else times.head_s)

    def _too_large(self) -> Refused:
        return Refused(Refusal.TOO_LARGE, f"The body is larger than {self._limit} bytes.")

    def _linger(self) -> None:
        """Close when the client has finished sending, so that it gets the response."""
        self.ended = True
        self._ahead.clear()
        self._ahead_bytes = 0
        self._release()
        self._settle()
        if self._scheme == "https":  # its end waits for the client's, and discards what comes before that
            self._transport.close()
        elif not self._transport.is_closing():
            self._transport.write_eof()
        self.deadline = self._server.now + self._server.times.linger_s

    def _refuse(self, refused: Refused) -> None:
        """Send an error response when the request is the current one; close when the client stops sending."""
        self._refused = refused
        self._release()
        self._settle()
        if self.ended or self._active is not None or self._ahead:
            return
        self.ended = True
        # Also of a head that is not complete or not valid, but not of the request before.
        received = dict(self._headers) if self._reading else {}
        request_id, _ = request_ids(received.get(b"x-request-id"))
        self._server.refused(refused, self._scope, request_id)
        anthropic = is_anthropic(self._url.partition(b"?")[0].decode("latin-1"))
        body = refused.body(anthropic=anthropic)
        head = refused.headers() + id_headers(request_id, anthropic=anthropic)
        head += self._server.refusal_headers(received)
        exchange = AsgiExchange(self, b"", keep=False, http_1_1=True, headless=False)
        exchange.send({"type": "http.response.start", "status": refused.status, "headers": head})
        exchange.send({"type": "http.response.body", "body": body})
        self._linger()


@lru_cache(maxsize=256)
def _is_host(value: bytes) -> bool:
    match = _HOST.fullmatch(value)
    if match is None:
        return False
    address, port = match.groups()
    if port and int(port) > _MAX_PORT:
        return False
    if address is not None:
        try:
            IPv6Address(address.decode())
        except ValueError:
            return False
    return True


def _head_too_large() -> Refused:
    return Refused(
        Refusal.HEAD_TOO_LARGE, f"A request's head takes {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes."
    )


@lru_cache(maxsize=256)
def _scope(url: bytes, method: bytes, http_1_1: bool) -> Scope:
    """The part of the ASGI scope from the request line; raises ``ValueError`` for an invalid target."""
    try:
        # Typed as bytes in the stub, but None for a part that the target does not have.
        parsed: Any = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError as error:
        raise ValueError from error
    raw_path: bytes = parsed.path or b"/"
    path = raw_path.decode("ascii")
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": "1.1" if http_1_1 else "1.0",
        "method": method.decode(),
        "scheme": "http",
        "path": unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": parsed.query or b"",
        "root_path": "",
        "client": None,
        "server": None,
    }
