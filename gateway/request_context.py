"""One client's request: its headers, body and answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from starlette.types import Message, Receive, Scope, Send

from gateway.http.asgi_exchange import id_headers, request_ids
from gateway.protocol.client_session import SESSION_HEADERS
from gateway.protocol.errors import Refused
from gateway.protocol.json_structure import JsonPieceReader
from gateway.protocol.paths import ApiDialect, ProxyRoute
from gateway.protocol.usage import TokenUsage, UsageBounds
from policy.errors import Refusal
from policy.types import Priority
from policy.wire.headers import CANARY_HEADER, DROPPED_HEADER, EXPLAIN_HEADER, REPLICA_HEADER

if TYPE_CHECKING:
    from gateway.delivery.replica_idle_timeouts import IdleTimeouts
    from gateway.http.asgi_exchange import AsgiExchange
    from gateway.http.http1_client import ProxiedConnection
    from gateway.intake.adapter_catalog import SelectedAdapter
    from gateway.intake.rate_limiter import RequestReservation
    from gateway.intake.usage_journal import UsageCharge
    from gateway.telemetry.traces.request_trace import RequestTrace

# Compared for each request: machine code reads a constant faster than a member of an enumeration.
_STANDARD: Final = Priority.STANDARD
_MESSAGES: Final = ApiDialect.MESSAGES

_CANARY: Final = CANARY_HEADER.encode()
_EXPLAIN: Final = EXPLAIN_HEADER.encode()
_REPLICA: Final = REPLICA_HEADER.encode()
_DROPPED: Final = DROPPED_HEADER.encode()
# Of names that can stand in a header, so many are listed.
_FIELD_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_LISTED: Final = 8
# nginx and its kind buffer an answer otherwise, and caches store it.
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
_COMMENT: Final = b": keep-alive\n\n"
HEADERS_READ: Final = frozenset(
    {
        b"accept",
        b"anthropic-version",
        b"authorization",
        b"content-encoding",
        b"transfer-encoding",
        b"traceparent",
        b"tracestate",
        b"x-api-key",
        b"x-request-id",
        b"x-request-timeout-s",
        *SESSION_HEADERS,
        _CANARY,
        _EXPLAIN,
    }
)
# The key of the scope for what :func:`headers_of` found, where the head was judged before the call began.
HEADERS: Final = "tidegate.headers"
# The key of the scope for the headers that let a web page read the answer: ``send`` adds them to every head
# but :meth:`RequestContext.json_head`.
CORS_HEADERS: Final = "tidegate.cors_headers"


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """The headers of a request that the gateway reads; of equal names the last."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return {name: value for name, value in headers if name in HEADERS_READ}


class RequestContext:
    """A request between the client's connection and a replica's. Instants are seconds of ``time.monotonic``.

    ``streaming``: a stream was requested. ``started``, ``answered``: the first, the last byte of the answer
    was sent; ``status`` is 0 before. ``only_opened``: of a stream the head and comments were sent, and no
    event yet. ``replica``: the last one that the request was sent to, or a fallback provider
    (``by_fallback``), at ``sent_at``; ``round_trip_s`` is the network's to it. ``first_byte_at`` (streams
    only), ``last_event_at``: the first and last event of its answer. ``engine_s``: the engine's time to the
    first byte, and ``engine_span_s`` from there to the last (streams only), as the replica reports them; -1
    if it does not. ``handled_s``: between reading the events and handing them on, in sum. ``events``: their
    number up to the one that finishes it. ``usage``: the tokens of an answer that has ended, within
    ``usage_bounds``; ``contradiction``: which of the engine's counts is not.
    ``explain`` yields the routing decision, if an admin requested it. ``priority``: that of its tenant.
    ``charge``: what its tenant pays, if it may; ``reservation``: what it holds of limits. ``probe``: our own,
    of which nothing is learned. ``adapter``: the version that it names. ``client``: its address and port.
    ``exchange``: the client's, on the client port. ``dropped``: fields of the body that no replica gets.
    ``trace`` is its trace, if requests are traced. ``pieces`` checks large answers. ``proxied``: another
    proxy sends it to the replica.
    """

    def __init__(
        self,
        route: ProxyRoute,
        scope: Scope,
        receive: Receive,
        send: Send,
        deadlines: IdleTimeouts | None = None,
        *,
        pieces: JsonPieceReader | None = None,
    ) -> None:
        self.route = route
        self.send = send
        self.deadlines = deadlines
        self.pieces = pieces or JsonPieceReader()
        self._receive = receive
        self.exchange: AsgiExchange | None = scope.get("tidegate.exchange")
        self.client: tuple[str, int] | None = scope.get("client")
        headers: dict[bytes, bytes] | None = scope.get(HEADERS)
        self.headers = headers_of(scope) if headers is None else headers
        self.request_id, self.upstream_id = request_ids(self.headers.get(b"x-request-id"))
        self.streaming = False
        self.dropped: list[str] = []
        self.priority = _STANDARD
        self.probe = False
        self.started = False
        self.only_opened = False
        self.answered = False
        self.outcome = ""
        self.status = 0
        self.queued_s = 0.0
        self.replica = b""
        self.by_fallback = False
        self.sent_at = 0.0
        self.round_trip_s = 0.0
        self.first_byte_at: float | None = None
        self.events = 0
        self.last_event_at = 0.0
        self.engine_s = self.engine_span_s = -1.0
        self.handled_s = 0.0
        self.usage: TokenUsage | None = None
        self.usage_bounds: UsageBounds | None = None
        self.contradiction = ""
        self.explain: Callable[[], bytes] | None = None
        self.adapter: SelectedAdapter | None = None
        self.charge: UsageCharge | None = None
        self.reservation: RequestReservation | None = None
        self.trace: RequestTrace | None = None
        self.proxied: ProxiedConnection | None = scope.get("tidegate.proxied")
        self._cors: list[tuple[bytes, bytes]] | None = scope.get(CORS_HEADERS)

    @property
    def disconnected(self) -> bool:
        """Whether the client has disconnected; the task that serves it is then cancelled."""
        return self.exchange is not None and self.exchange.disconnected

    @property
    def waits(self) -> bool:
        """Whether the client got nothing of the answer yet, but perhaps comments."""
        return self.only_opened or not self.started

    def comment(self) -> None:
        """Send a comment to the client of a stream that waits, and before the first one the head."""
        if not self.started:
            self.started = self.only_opened = True
            self.send(self.head(200, [_EVENT_STREAM, *STREAM_HEADERS]))
        self.send({"type": "http.response.body", "body": _COMMENT, "more_body": True})

    @property
    def mean_gap_s(self) -> float:
        """The mean gap between the events of a stream in seconds; 0 with fewer than two."""
        first_at = self.first_byte_at
        return (self.last_event_at - first_at) / (self.events - 1) if first_at and self.events > 1 else 0.0

    async def read(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        body: bytes = message["body"]
        return body

    def accepted(self) -> None:
        """The body is read and checked."""
        if self.exchange is not None:
            self.exchange.body_checked()
        elif self.proxied is not None:
            self.proxied.body_checked()

    def timeout_s(self, default: float) -> float:
        """How long the request may wait for a replica: its header's value if that is shorter."""
        raw = self.headers.get(b"x-request-timeout-s")
        if raw is None:
            return default
        try:
            wanted = float(raw)
        except ValueError:
            wanted = -1.0
        if not 0 < wanted < float("inf"):
            raise Refused(
                Refusal.BAD_REQUEST,
                "x-request-timeout-s must be a positive number of seconds.",
                param="x-request-timeout-s",
            )
        return min(default, wanted)

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> Message:
        """The head of the answer, with the request id."""
        self.status = status
        headers += id_headers(self.request_id, anthropic=self.route.api is _MESSAGES)
        headers += self._own_headers()
        return {"type": "http.response.start", "status": status, "headers": headers}

    def json_head(self) -> bytes:
        """The header lines of a whole answer with status 200, without its length."""
        self.status = 200
        lines = b"content-type: application/json\r\n%b: %b\r\nx-request-id: %b\r\n" % (
            _REPLICA, self.replica, self.request_id,
        )  # fmt: skip
        if self.route.api is _MESSAGES:
            lines += b"request-id: %b\r\n" % self.request_id
        headers = self._own_headers()
        if self._cors is not None:
            headers = [*headers, *self._cors]
        for name, value in headers:
            lines += b"%b: %b\r\n" % (name, value)
        return lines

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        """What the gateway tells the client of limits, of its decision, and of fields that it dropped."""
        headers = [] if self.reservation is None else self.reservation.headers
        if self.explain is not None:
            headers = [*headers, (_EXPLAIN, self.explain())]
        if self.dropped:
            headers = [*headers, (_DROPPED, _listed(self.dropped))]
        return headers

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.started = self.answered = True
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send(self.head(status, headers))
        await self.send({"type": "http.response.body", "body": body})

    async def refuse(self, refused: Refused) -> None:
        """Answer with an error in the envelope of the call's API; in an opened stream, as its event."""
        if self.only_opened:
            self.answered = True
            await self.send({"type": "http.response.body", "body": refused.event(self.route.api)})
            return
        headers = refused.headers()
        if self.replica:
            headers.append((_REPLICA, self.replica))
        if (trace := self.trace) is not None:
            headers.append((b"traceresponse", trace.response(failed=refused.status >= 500)))
        body = refused.body(anthropic=self.route.api is _MESSAGES)
        await self.answer(refused.status, headers, body)


def _listed(names: list[str]) -> bytes:
    """The first of ``names`` that are plain ones, as a header's value; ``*`` for all others."""
    plain = [name for name in names if _FIELD_NAME.fullmatch(name)]
    listed = plain[:_MAX_LISTED]
    return ", ".join(listed if len(listed) == len(names) else [*listed, "*"]).encode()
