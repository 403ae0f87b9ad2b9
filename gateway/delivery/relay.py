"""One attempt of one call on one replica: from the response's head to the client's last byte.

The commit point is the first event of a stream, or the last byte of any other answer. An attempt may be
repeated elsewhere before it, never after it. Comments before the first event commit to nothing.

This module is over 400 lines: every kind of response ends in one outcome, and all share the commit point.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from time import monotonic
from typing import Final

from starlette.types import Message

from gateway.delivery.replica_idle_timeouts import TimedAttempt
from gateway.http.asgi_exchange import SENT, AsgiExchange
from gateway.http.byte_accumulator import ByteAccumulator
from gateway.http.http1_client import UpstreamConnection
from gateway.intake.usage_journal import UsageCharge
from gateway.protocol.errors import (
    MAX_ERROR_BYTES,
    Refused,
    adapter_failure,
    cause_of,
    denies_model,
    from_upstream,
    shown_failure,
    status_of,
)
from gateway.protocol.json_decoders import NULL, NonStreamingResponse, answer
from gateway.protocol.paths import ApiDialect
from gateway.protocol.response_model_name import ModelNameRewrite
from gateway.protocol.sse_validator import SseValidator
from gateway.protocol.usage import MAX_USAGE_BYTES, EventTokens, TokenUsage, usage_of_answer
from gateway.request_context import STREAM_HEADERS, RequestContext
from gateway.telemetry.metrics import ModelCounters
from policy.admission.retry_policy import AttemptOutcome
from policy.errors import Refusal
from policy.types import Runner
from policy.wire.headers import ENGINE_TIME_HEADER, REFUSAL_HEADER, REPLICA_HEADER

# Compared for each request: machine code reads a constant faster than a member of an enumeration.
_SERVED: Final = AttemptOutcome.SERVED
_GENERATE: Final = Runner.GENERATE
_RESPONSES: Final = ApiDialect.RESPONSES
_BUSY: Final = Refusal.BUSY

# An answer up to this size is held until it is whole, so that one that breaks, or is no JSON, can be had
# elsewhere. Longer ones (many vectors) pass as they come. The worst JSON of this size is checked in 12 ms.
MAX_HELD: Final = 2 * 1024 * 1024
# A longer one is checked in a turn of the event loop of its own.
MAX_CHECKED: Final = 64 * 1024
_REFUSAL: Final = REFUSAL_HEADER.encode()
_REPLICA: Final = REPLICA_HEADER.encode()
_ENGINE_TIME: Final = ENGINE_TIME_HEADER.encode()
_ENGINE_SPAN: Final = b": %b " % _ENGINE_TIME
_NEWLINE: Final = ord("\n")
# A replica's own headers reach no client: of them only lengths, and seconds to wait, are read.
_EVENTS: Final = b"text/event-stream; charset=utf-8"
_JSON: Final = b"application/json"
FAILED: Final = "The replica failed to answer the request."


class Relay(TimedAttempt):
    """The sink of the upstream connection; ``done`` yields the outcome.

    ``refused`` is the error for the client if the request is not tried again, ``reason`` why the replica did
    not take it for ``REFUSED`` and ``DECLINED``. ``begun``: a stream's first event came. ``committed``: the
    client was sent a part of the answer. ``held_back``: reading is paused for a slow client. ``on_first`` is
    called at the first token, ``meter`` counts for the model. ``lost``: the connection ended too early.
    ``stall_from``: since when it was silent at its last stall. ``rewrite`` gives our name of the model to the
    answer of a server with another one. ``tokens``: those of events, if they may have several.
    """

    def __init__(
        self,
        call: RequestContext,
        connection: UpstreamConnection,
        validator: SseValidator,
        meter: ModelCounters,
        on_first: Callable[[], None] | None = None,
        *,
        rewrite: ModelNameRewrite | None = None,
        tokens: EventTokens | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._call = call
        self._send = call.send
        self._connection = connection
        self._validator = validator
        self.meter = meter
        self._itl = meter.itl
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._stream = False
        self._error: bytearray | None = None
        self._end = b""
        self._held = ByteAccumulator()
        self._unchecked = b""
        self._charge = call.charge
        self._reported: TokenUsage | None = None
        self._answer: NonStreamingResponse | None = None
        self._accounted = False
        self.committed = False
        self.held_back = False
        self._last_at = 0.0
        self.streams = call.streaming
        self.begun = False
        self.lost = False
        self.sent_at = self.quiet_since = self.stall_from = 0.0
        self.reason = _BUSY
        self.refused: Refused | None = None
        self._on_first = on_first
        self._rewrite = rewrite
        self._event_tokens = tokens
        # To ask for the running loop is a system call.
        self.done: asyncio.Future[AttemptOutcome] = (loop or asyncio.get_running_loop()).create_future()

    async def run(self, head: bytes, body: bytes | Sequence[bytes | memoryview]) -> AttemptOutcome:
        """Send the request, whose body is one or several buffers, and relay its answer."""
        call = self._call
        self.sent_at = self.quiet_since = call.sent_at = monotonic()
        deadlines = call.deadlines
        if deadlines is not None:
            deadlines.attempts.add(self)
        try:
            self._connection.send(self, head, body)
            outcome = await self.done
            if self._unchecked:
                await call.pieces.alone(self._check_large)
                outcome = await self.done
            return outcome
        except asyncio.CancelledError:
            self._connection.abort(self)
            if self.committed and self._stream and not (call.disconnected or call.answered):
                # The drain timeout has passed: a cut stream must not look complete.
                self._end_with_error(Refused(Refusal.SHUTTING_DOWN, "The gateway is shutting down."))
            raise
        finally:
            self._on_first = None
            if deadlines is not None:
                deadlines.attempts.discard(self)
            if self.committed:
                self._account()

    # TimedAttempt

    @property
    def model(self) -> str:
        """The name of the model in the deployment."""
        return self.meter.model

    @property
    def events(self) -> int:
        """The events of the stream so far."""
        return self._validator.events

    def has_progressed(self) -> bool:
        """Whether bytes came since the last call, or could not since the client is slow."""
        received, self._connection.received = self._connection.received, False
        return received or self.held_back

    def expire(self, waited_s: float) -> None:
        """The replica was silent for ``waited_s`` seconds: end the attempt."""
        if self.done.done():
            return
        if self._validator.closed:
            self._cut()
            return
        self._connection.abort(self)
        refused = Refused(Refusal.UPSTREAM_SILENT, f"The replica was silent for {waited_s:g} s.")
        if not self.committed:
            self.refused = refused
            self._settle(AttemptOutcome.SILENT)
            return
        if self._stream:
            self._end_with_error(refused)
        self._settle(AttemptOutcome.BROKEN)

    # Sink

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        self._headers = headers
        if status == 200:
            kind = headers.get(b"content-type", b"")
            self._stream = kind.startswith(b"text/event-stream")
            expected = self.streams
            if not self._stream:  # engines answer pooling requests whole, streamed or not
                generates = self._call.route.runner is _GENERATE
                expected = kind.startswith(b"application/json") and not (self.streams and generates)
            if expected and b"content-encoding" not in headers:
                return
        self._error = bytearray()

    def on_data(self, data: bytes, *, complete: bool) -> None:
        try:
            if self._error is not None:
                self._collect(data, complete)
            elif self._stream:
                self._relay_events(data, complete)
            else:
                self._relay_bytes(data, complete)
        except Exception as error:  # noqa: BLE001 - whatever breaks here, the call must end
            self._fail(error)

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        if not self._stream or self._error is not None:
            self.on_data(data, complete=False)
            return
        try:
            self._relay_events(data, False, framed)
        except Exception as error:  # noqa: BLE001 - whatever breaks here, the call must end
            self._fail(error)

    def on_lost(self, *, stale: bool) -> None:
        try:
            self._lose(stale)
        except Exception as error:  # noqa: BLE001 - whatever breaks here, the call must end
            self._fail(error)

    # by kind of answer

    def _lose(self, stale: bool) -> None:
        self.lost = not (stale or self.held_back)
        if self.committed:
            if self._stream:
                self._end_stream(clean=False)
            if self._ended_well():
                self._settle(_SERVED)
            else:  # a replica cuts the stream of a client that leaves megabytes unread
                self._settle(AttemptOutcome.LEFT if self.held_back else AttemptOutcome.BROKEN)
        else:
            self._settle(AttemptOutcome.STALE if stale else AttemptOutcome.LOST)

    def _relay_bytes(self, data: bytes, complete: bool) -> None:
        if not self.committed:
            if not data and not complete:
                return
            held = self._held
            if not held.size:
                self._first()
            length = self._headers.get(b"content-length", b"")
            held.add(data, min(int(length), MAX_HELD) if length.isdigit() else 0)
            if not complete and held.size <= MAX_HELD:
                return
            data = held.take()
            if complete and len(data) > MAX_CHECKED:
                self._unchecked = data
                self._settle(_SERVED)
                return
            if complete and not (data := self._answer_of(data)):
                return
        self._relay_part(data, complete)

    def _check_large(self) -> None:
        """Relay a large answer that has arrived, or end the attempt if it is none."""
        data, self._unchecked = self._unchecked, b""
        self.done = asyncio.get_running_loop().create_future()
        if data := self._answer_of(data):
            self._relay_part(data, True)

    def _relay_part(self, data: bytes, complete: bool) -> None:
        """Relay a part of an answer that is no stream, or the whole of it."""
        if complete and not self.committed and not self._call.started and self._call.exchange is not None:
            self._relay_whole(data, self._call.exchange)
            return
        if not self.committed:
            length = None if self._rewrite is not None else self._headers.get(b"content-length")
            if self._rewrite is not None:
                data = self._rewrite.feed(data, complete=complete)
            if complete:
                length = str(len(data)).encode()
            self._commit([] if length is None else [(b"content-length", length)])
        elif self._rewrite is not None:
            data = self._rewrite.feed(data, complete=complete)
        self._end = data if not self._end else (self._end + data)[-MAX_USAGE_BYTES:]
        if complete:
            self._call.answered = True
            self._account()
        self._put({"type": "http.response.body", "body": data, "more_body": not complete})
        if complete:
            self._settle(_SERVED)

    def _relay_whole(self, data: bytes, exchange: AsgiExchange) -> None:
        """As :meth:`_relay_part`, of a whole answer on the client port: in one write."""
        if self._rewrite is not None:
            data = self._rewrite.feed(data, complete=True)
        self.committed = True
        if (charge := self._charge) is not None:
            charge.begin()
        self._end = data
        self._call.started = self._call.answered = True
        self._account()
        if (sent := exchange.answer(self._call.json_head(), data)) is not SENT:
            self._hold(sent)
        self._settle(_SERVED)

    def _relay_events(self, data: bytes, complete: bool, framed: bytes | None = None) -> None:
        validator = self._validator
        finished = validator.finished
        if (finished or complete) and (at := data.rfind(_ENGINE_SPAN)) >= 0 and _begins_line(data, at):
            self._call.engine_span_s = _seconds_of(data[at + len(_ENGINE_SPAN) :])
            data, framed = data[:at], None
            if not data and not complete:
                return
        if validator.closed and not complete:  # data after the final event
            self._cut()
            return
        now = monotonic()
        out = validator.feed(data)
        if complete:
            out += validator.rest()
        if out:
            if not self.committed:
                if validator.failed and validator.closed and self._fails_at_once():
                    return
                headers = list(STREAM_HEADERS)
                if validator.events or validator.closed:
                    self._commit(headers)
                else:  # comments
                    self._open(headers)
            if self._last_at:
                self._itl.add(now - self._last_at)
                self._last_at = now
            elif self.committed:
                self.begun = True
                self._call.first_byte_at = self._last_at = now
                self._first()
            if not finished:  # what follows the last token comes at once
                self._call.last_event_at = now
            if self._rewrite is not None:
                out = self._rewrite.whole(out)
            if (charge := self._charge) is not None:
                charge.relay(self._tokens_of(validator.events))
                if validator.usage is not self._reported:
                    self._report(charge)
            if validator.counted and self.committed:
                self._account()
            self._pass_on(out, framed if out is data else None)
            self._call.handled_s += monotonic() - now
        if complete:
            if not self.committed:
                self._failed("The replica's stream is empty.")
                return
            self._end_stream(clean=True)
            self._settle(_SERVED if self._ended_well() else AttemptOutcome.BROKEN)
        elif validator.failed:
            self._cut()

    def _cut(self) -> None:
        """The answer is complete, and the upstream sends more."""
        self._connection.abort(self)
        self._end_stream(clean=True)
        self._settle(_SERVED if self._ended_well() else AttemptOutcome.BROKEN)

    def _fails_at_once(self) -> bool:
        """Whether a stream that failed before the client was sent any of it ends this attempt."""
        error, status = self._validator.error, status_of(self._validator.error)
        # vLLM opens the stream before it has validated the request.
        if self._validator.events > 1 and not 400 <= status < 500:
            return False
        self._connection.abort(self)
        if error:
            self._judge(status, error, None)
        else:
            self._failed("The replica's stream is invalid.")
        return True

    def _report(self, charge: UsageCharge) -> None:
        """Charge what the engine reports within a stream, until it is counted."""
        self._reported = usage = self._validator.usage
        if usage is not None:
            charge.report(usage, self._tokens_of(self._validator.usage_at))

    def _commit(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.committed = True
        if (charge := self._charge) is not None:
            charge.begin()
        self._open(headers)
        self._call.only_opened = False

    def _open(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head, if no comment was sent before."""
        call = self._call
        if not call.started:
            call.started = call.only_opened = True
            headers.append((b"content-type", _EVENTS if self._stream else _JSON))
            headers.append((_REPLICA, call.replica))
            self._put(call.head(200, headers))

    def _first(self) -> None:
        if self._on_first is not None:
            self._on_first()

    def _end_stream(self, *, clean: bool) -> None:
        last = b""
        if (refused := self._validator.end(clean=clean)) is not None:
            last = refused.event(self._call.route.api)
        self._call.answered = True
        self._account()
        self._put({"type": "http.response.body", "body": last, "more_body": False})

    def _end_with_error(self, refused: Refused) -> None:
        """End a stream that was begun with an error event."""
        self._call.answered = True
        self._account()
        self._put({"type": "http.response.body", "body": refused.event(self._call.route.api)})

    def _put(self, message: Message) -> None:
        """Send to the client; a slow client pauses reading from the replica."""
        sent = self._send(message)
        if sent is not SENT:
            self._hold(sent)

    def _pass_on(self, events: bytes, framed: bytes | None) -> None:
        """As :meth:`_put`, of a part of a stream; ``framed`` is all of it as one chunk, if it came so."""
        exchange = self._call.exchange
        if exchange is None:
            self._put({"type": "http.response.body", "body": events, "more_body": True})
        elif (sent := exchange.pass_on(events, framed)) is not SENT:
            self._hold(sent)

    def _hold(self, sent: Awaitable[None]) -> None:
        if not self.held_back:
            assert isinstance(sent, asyncio.Future)
            self.held_back = True
            self._connection.pause(self)
            sent.add_done_callback(self._resume)

    def _resume(self, _: asyncio.Future[None]) -> None:
        self.held_back = False
        self._connection.resume(self)

    def _ended_well(self) -> bool:
        """Whether the replica did its part: an error that it reports may be the request's own."""
        validator = self._validator
        return self._stream and (not validator.failed or 400 <= status_of(validator.error) < 500)

    def _tokens_of(self, events: int) -> int:
        """The tokens of so many events, which an engine has not counted."""
        return events if self._event_tokens is None else self._event_tokens.of(events)

    def _account(self) -> None:
        """Count the tokens of the answer, as far as it came; once, and before the client has all of it."""
        if self._accounted:
            return
        self._accounted = True
        call, validator = self._call, self._validator
        events = validator.events
        usage = usage_of_answer(self._end, self._answer) if not self._stream else validator.usage
        if self._stream and not validator.counted:
            usage = None  # what was reported on the way is not all
        bounds = call.usage_bounds
        charged = usage
        if bounds is not None:
            if usage is not None and (what := bounds.contradiction(usage, events)):
                call.contradiction, usage = what, bounds.estimate(self._tokens_of(events))
                charged = usage
                self.meter.contradictions[what] += 1
            elif usage is None and not self._stream:
                charged = bounds.estimate(0)
        call.events = events
        if (took := self._headers.get(_ENGINE_TIME)) is not None:
            call.engine_s = _seconds_of(took)
        call.usage = usage = usage or TokenUsage(completion=self._tokens_of(events), exact=False)
        self.meter.tokens.count(usage)
        if self._charge is not None:
            self._charge.end(charged)

    def _collect(self, data: bytes, complete: bool) -> None:
        assert self._error is not None
        self._error += data
        if not complete and len(self._error) <= MAX_ERROR_BYTES:
            return
        if not complete:
            self._connection.abort(self)
        body = bytes(self._error)
        retry_after = self._headers.get(b"retry-after")
        if self._status == 503 and (reason := self._headers.get(_REFUSAL)) is not None:
            self.reason = _REASONS.get(reason, _BUSY)
            if self.reason is Refusal.ADAPTER_FAILED:
                self.refused = Refused(self.reason, cause_of(body))
            # An engine that died under the request counts as a lost connection.
            self._settle(
                AttemptOutcome.LOST if self.reason is Refusal.REPLICA_LOST else AttemptOutcome.REFUSED
            )
        else:
            self._judge(self._status, body, retry_after)

    def _judge(self, status: int, error: bytes, retry_after: bytes | None) -> None:
        """End the attempt, whose answer was an ``error`` with this status (0: none)."""
        if status in _REPLICA_DECLINES:
            outcome = AttemptOutcome.DECLINED
        elif status in (404, 405):
            outcome = AttemptOutcome.DENIED
            if denies_model(error):
                outcome, self.reason = AttemptOutcome.DECLINED, Refusal.UNKNOWN_MODEL
        elif 400 <= status < 500:
            outcome = AttemptOutcome.REJECTED
        else:
            outcome = AttemptOutcome.FAILED
        if status in (0, 500) and (refused := adapter_failure(error)) is not None:
            self.refused, outcome = refused, AttemptOutcome.REJECTED
        elif 400 <= status < 500 and status not in (401, 403, 407):
            self.refused = from_upstream(status, error, retry_after, self._call.route)
        else:
            why = Refusal.NO_REPLICA if status == 503 else Refusal.UPSTREAM_FAILED
            wait = int(retry_after) if retry_after is not None and retry_after.isdigit() else None
            self.refused = Refused(why, FAILED, retry_after_s=wait)
        self._settle(outcome)

    def _failed(self, why: str) -> None:
        """End the attempt, whose answer was no valid one."""
        self.refused = Refused(Refusal.UPSTREAM_FAILED, why)
        self._settle(AttemptOutcome.FAILED)

    def _answer_of(self, data: bytes) -> bytes:
        """The whole answer ``data`` as the client may see it; empty if it is none, which ends the attempt."""
        try:
            str(data, "utf-8")
            self._answer = decoded = answer.decode(data)
        except (ValueError, RecursionError):
            self._failed("The replica's answer is not valid JSON.")
            return b""
        if (error := decoded.error) is NULL or error == NULL:
            return data
        if self._call.route.api is _RESPONSES:
            return shown_failure(data)
        self._judge(status_of(data), data, None)
        return b""

    def _settle(self, outcome: AttemptOutcome) -> None:
        if not self.done.done():
            self.done.set_result(outcome)

    def _fail(self, error: Exception) -> None:
        self._connection.abort(self)
        if not self.done.done():
            self.done.set_exception(error)


def _begins_line(data: bytes, at: int) -> bool:
    """Whether a line begins ``at`` this place: an answer's text has no line ends of its own."""
    return at == 0 or data[at - 1] == _NEWLINE


def _seconds_of(text: bytes) -> float:
    """A duration that a replica reports; -1 if it is none."""
    try:
        seconds = float(text)
    except ValueError:
        return -1.0
    return seconds if 0.0 <= seconds < inf else -1.0


# Not the request's fault: wrong credentials of ours, a conflict or timeout there, a rate limit, an overload.
_REPLICA_DECLINES: Final = frozenset({401, 403, 407, 408, 409, 425, 429, 503})
_REASONS: Final = {
    str(reason).encode(): reason
    for reason in (
        _BUSY, Refusal.DRAINING, Refusal.STARTING, Refusal.REPLICA_LOST, Refusal.ADAPTER_FAILED,
    )
}  # fmt: skip
