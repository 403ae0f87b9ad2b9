"""One request on a client connection and its response, as an ASGI exchange.

``send`` writes at once; its awaitable is done already unless the client reads too slowly.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import re
import secrets
from collections.abc import Awaitable, Generator
from typing import Final

from starlette.types import Message

from gateway.http.forwarded import Address
from gateway.http.upload_budget import PendingBody, UploadBudget

_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}

_BODILESS: Final = frozenset((204, 304))

_VALID_ID: Final = re.compile(rb"[A-Za-z0-9_-]{1,128}")

# Unique over processes and restarts by the random part, within one by the count.
_PREFIX: Final = secrets.token_hex(8).encode()

_COUNT = itertools.count(1)


def request_ids(given: bytes | None) -> tuple[bytes, bytes]:
    """The request id for the client, and the unique one for the replica, by which engines key requests."""
    unique = b"%s-%x" % (_PREFIX, next(_COUNT))
    if given is not None and _VALID_ID.fullmatch(given):
        return given, given + b"-" + unique
    return unique, unique


def id_headers(request_id: bytes, *, anthropic: bool) -> list[tuple[bytes, bytes]]:
    """The headers with the request id: Anthropic's clients read their own."""
    headers = [(b"x-request-id", request_id)]
    if anthropic:
        headers.append((b"request-id", request_id))
    return headers


class _Sent:
    """An awaitable that is done already: awaiting it does not yield to the loop."""

    def __await__(self) -> Generator[None, None, None]:
        return iter(())  # type: ignore[return-value] # an exhausted iterator is a finished generator


SENT: Awaitable[None] = _Sent()


class ClientConnection:
    """What a response is written to. ``sent`` is a future while the client reads too slowly."""

    sent: Awaitable[None]

    @property
    def draining(self) -> bool:
        """Whether the server closes the connection after the response."""
        raise NotImplementedError

    def general_header(self) -> bytes:
        """The header lines of every response."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Send ``data`` at once; does nothing if the connection is closing."""
        raise NotImplementedError

    def answered(self, exchange: AsgiExchange) -> None:
        """The last byte of the response of ``exchange`` is written."""
        raise NotImplementedError

    def abort(self) -> None:
        """Close it at once."""
        raise NotImplementedError


class AsgiExchange:
    """A complete request, with a body of ``size`` bytes.

    ``disconnected``: the client left before the response was complete.
    ``keep`` is whether the connection stays open for another request. ``begun`` is set when its ``task``
    runs, ``started`` and ``done`` when the first and the last byte of the response are written.
    """

    def __init__(
        self, connection: ClientConnection, body: bytes, *, keep: bool, http_1_1: bool, headless: bool
    ) -> None:
        self._connection = connection
        self._body: bytes | None = body
        self.size = len(body)
        self._http_1_1 = http_1_1
        self._headless = headless
        self._head: Message | None = None
        self._chunked = False
        self._gone: asyncio.Future[None] | None = None
        self.keep = keep
        self.begun = False
        self.started = False
        self.done = False
        self.disconnected = False
        self.task: asyncio.Task[None] | None = None
        self._uploads: UploadBudget | None = None
        self._pending: PendingBody | None = None

    def count_body(self, uploads: UploadBudget, client: Address | None) -> None:
        """Count the body in ``uploads`` until it is read, or will not be."""
        self._uploads = uploads
        self._pending = uploads.keep(client, self.size)

    def body_checked(self) -> None:
        """The body is checked, or will not be: it is no upload any more. May be called again."""
        pending, self._pending = self._pending, None
        if pending is not None and self._uploads is not None:
            self._uploads.release(pending)

    async def receive(self) -> Message:
        """The complete body, then a disconnect when the response is complete or the client has gone."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if not (self.done or self.disconnected):
            if self._gone is None:
                self._gone = asyncio.get_running_loop().create_future()
            await self._gone
        return {"type": "http.disconnect"}

    def send(self, message: Message) -> Awaitable[None]:
        """Write a message; returns :data:`SENT`, or a future while the client reads too slowly."""
        if message["type"] == "http.response.start":
            self._head = message
            return SENT
        if self.done or self.disconnected:
            return SENT
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if not self.started:
            self._begin(body, more)
        elif self._chunked:
            if not more:
                self._connection.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n")
            elif body:
                self._connection.write(b"%x\r\n%b\r\n" % (len(body), body))
        elif body and not self._headless:
            self._connection.write(body)
        if not more:
            self._finish()
        return self._connection.sent

    def pass_on(self, body: bytes, framed: bytes | None) -> Awaitable[None]:
        """Send a part of the body that is not the last; ``framed`` is it as an HTTP/1.1 chunk, if known."""
        if self._chunked and not (self.done or self.disconnected):
            self._connection.write(framed or b"%x\r\n%b\r\n" % (len(body), body))
            return self._connection.sent
        return self.send({"type": "http.response.body", "body": body, "more_body": True})

    def answer(self, lines: bytes, body: bytes) -> Awaitable[None]:
        """Send a whole response with status 200 and these header ``lines``, which lack its length."""
        if self.done or self.disconnected:
            return SENT
        self.started = True
        length = b"content-length: %d\r\n" % len(body)
        head = [_STATUS_LINES[200], self._connection.general_header(), lines, length, self._last_lines()]
        if not self._headless:
            head.append(body)
        self._connection.write(b"".join(head))
        self._finish()
        return self._connection.sent

    def end(self) -> None:
        """The task of the request has ended, with or without a complete response."""
        self.task = None
        self.body_checked()
        if not (self.done or self.disconnected):
            self._connection.abort()

    def disconnect(self) -> None:
        """The client disconnected before the response was complete."""
        self.disconnected = True
        self._wake()

    def _begin(self, body: bytes, more: bool) -> None:
        """Write the head and the first part of the body in one call."""
        assert self._head is not None
        self.started = True
        status: int = self._head["status"]
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, self._connection.general_header()]
        length = False
        headers: list[tuple[bytes, bytes]] = self._head["headers"]
        for name, value in headers:
            if name == b"content-length":
                length = True
            elif name == b"connection":
                self.keep = self.keep and value.lower() != b"close"
                continue
            lines.append(name)
            lines.append(b": ")
            lines.append(value)
            lines.append(b"\r\n")
        self._head = None
        if not length and status not in _BODILESS:
            if not more:
                lines.append(b"content-length: %d\r\n" % len(body))
            elif self._http_1_1:
                self._chunked = not self._headless
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep = False
        lines.append(self._last_lines())
        if body and not self._headless:
            lines.append(b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else body)
        self._connection.write(b"".join(lines))

    def _last_lines(self) -> bytes:
        """The end of a head: whether the connection stays open, where that is not usual."""
        if self._connection.draining:
            self.keep = False
        if not self.keep:
            return b"connection: close\r\n\r\n"
        return b"\r\n" if self._http_1_1 else b"connection: keep-alive\r\n\r\n"

    def _finish(self) -> None:
        self.done = True
        self._wake()
        self._connection.answered(self)

    def _wake(self) -> None:
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
