"""Send a call to replicas until one serves it; ``policy.admission.dispatcher`` decides on retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from gateway.delivery.crash_suspects import HostCrashSuspects, fingerprint
from gateway.delivery.relay import Relay
from gateway.http.http1_client import UpstreamConnection, is_local_fault
from gateway.http.read_turns import request_starts
from gateway.protocol.body import RequestBody
from gateway.protocol.errors import Refused
from gateway.protocol.json_splice import UpstreamRequestBody, upstream_body
from gateway.protocol.paths import ApiDialect, ProxyRoute
from gateway.protocol.response_model_name import ModelNameRewrite
from gateway.protocol.sse_validator import ChatValidator, MessagesValidator, ResponsesValidator, SseValidator
from gateway.protocol.usage import event_tokens
from gateway.queue.model_queue import QueueTicket
from gateway.request_context import RequestContext
from gateway.routing.engine_cache.prompt_tokens import TokenizablePrompt
from gateway.routing.replica_handle import ReplicaHandle
from gateway.telemetry.metrics import ModelCounters
from gateway.telemetry.traces.request_trace import TracedAttempt
from policy.admission.retry_policy import MAX_BEGUN, AttemptOutcome
from policy.errors import Refusal
from policy.request import Request
from policy.routing.concurrency_limit import ConcurrencyLimit, WholeAnswer
from policy.types import EngineKind, Runner
from policy.wire.headers import DEPTHS_HEADER, PREFILL_HEADER, PREFIX_HEADER

# Machine code reads constants faster than names of other modules and members of enumerations.
monotonic: Final = time.monotonic
_SERVED: Final = AttemptOutcome.SERVED
_BROKEN: Final = AttemptOutcome.BROKEN
_LOST: Final = AttemptOutcome.LOST
_LEFT: Final = AttemptOutcome.LEFT
_REFUSED: Final = AttemptOutcome.REFUSED
_SILENT: Final = AttemptOutcome.SILENT
_RESPONSES: Final = ApiDialect.RESPONSES
_MESSAGES: Final = ApiDialect.MESSAGES
_GENERATE: Final = Runner.GENERATE
_EXTERNAL: Final = EngineKind.EXTERNAL

# What becomes of the requests on a replica that dies.
_LOSSES: Final = frozenset({_LOST, _BROKEN})
# Within this time the replicas of a lost node or cluster are dead.
TOGETHER_S: Final = 0.5
# Of the bodies of clients that leave, longer ones are not hashed: many may leave at once.
MAX_HASHED: Final = 1024 * 1024
# Prefix hashes that a request's head carries for other hosts, 17 bytes each.
MAX_NEW_HASHES: Final = 64

_FORWARDED = (b"accept", b"anthropic-version", b"tracestate")
_FORWARDED_UNTRACED = (*_FORWARDED, b"traceparent")
_PREFILL: Final = PREFILL_HEADER.encode()
_PREFIX: Final = PREFIX_HEADER.encode()
_DEPTHS: Final = DEPTHS_HEADER.encode()
# Of an answer that is no stream, which is given no events.
_UNUSED: Final = SseValidator()


class RetryLoop:
    def __init__(
        self, ticket: QueueTicket, call: RequestContext, meter: ModelCounters, suspects: HostCrashSuspects, *,
        body: RequestBody, raw: bytes, salt: bytes,
    ) -> None:  # fmt: skip
        self._ticket = ticket
        self._is_external = ticket.served.engine is _EXTERNAL
        self._call = call
        self._body = body
        self._raw = raw
        self._salt = salt
        self._meter = meter
        self._suspects = suspects
        self._hash = 0
        self._loop = ticket.loop
        self._clock = self._loop.time
        self._limit: ConcurrencyLimit | None = None

    async def run(self) -> None:
        """Serve the call; raises :class:`gateway.protocol.errors.Refused` with its client's error."""
        call, ticket = self._call, self._ticket
        while True:
            asked_at = monotonic()
            if (trace := call.trace) is not None:
                trace.asked_at = asked_at
            refusal: Refused | None = None
            try:
                replica = await ticket.wait()
            except Refused as error:
                refusal = error
            finally:
                granted_at = monotonic()
                call.queued_s += granted_at - asked_at
            if refusal is not None:
                if ticket.has_waited:
                    await self._in_its_turn()
                raise refusal
            call.replica, call.round_trip_s = replica.label, replica.round_trip_s
            if trace is not None:
                trace.begin(
                    TracedAttempt(
                        asked_at,
                        granted_at,
                        replica.label,
                        ticket.expected_wait_s,
                        ticket.quote,
                        ticket.decision,
                    )
                )
            outcome, refused = await self._tried(replica)
            if outcome is _SERVED:
                call.outcome = "ok"
                return
            if outcome is _BROKEN or outcome is _LEFT:
                call.outcome = Refusal.STREAM_BROKEN
                return
            if call.proxied is not None:  # it was sent, and cannot be again
                raise refused or Refused(Refusal.UPSTREAM_FAILED, "The replica failed to answer the request.")
            if ticket.rejection is not None:
                if outcome is not _LOST or not await self._is_excused():
                    raise ticket.refused(refused)
                ticket.excuse()

    async def _tried(self, replica: ReplicaHandle) -> tuple[AttemptOutcome, Refused | None]:
        """One attempt, reported before its slot is given to another request."""
        outcome, adapter_failed, gap_s = _LEFT, False, 0.0
        alone = False
        try:
            alone = self._suspects.some and self._runs_alone()
            outcome, relay = await self._attempt(replica)
            if outcome in _LOSSES:
                self._suspects.lost(self._fingerprint(), replica.view.key, monotonic())
                if outcome is _LOST:
                    replica.died()
            elif outcome is _SILENT:
                self._ended_early(replica, hung=True)
            elif outcome is _SERVED and self._suspects.some:
                self._suspects.served(self._fingerprint(), monotonic())
            refused = relay.refused if relay is not None else None
            if outcome is _REFUSED and relay is not None:
                if relay.reason is Refusal.ADAPTER_FAILED:
                    adapter_failed, adapter = True, self._ticket.request.adapter
                    self._ticket.served.record_load_failure(adapter, refused.message if refused else "")
                    replica.cannot_load(adapter)
                else:
                    replica.refused(relay.reason)
            elif outcome is AttemptOutcome.UNREACHABLE and self._is_external:
                replica.set_answering(self._clock(), False)  # until it is probed again
            elif outcome is _SERVED:
                gap_s = self._call.mean_gap_s
                if self._limit is not None and not self._call.streaming:
                    self._whole_answer(self._limit)
            self._meter.attempts[outcome] += 1
            return outcome, refused
        except asyncio.CancelledError:
            self._meter.attempts[_LEFT] += 1
            if self._call.sent_at >= self._ticket.taken_at:  # not before, in another attempt
                self._ended_early(replica, hung=False)
            raise
        finally:
            if alone:
                self._suspects.end()
            if (trace := self._call.trace) is not None:
                trace.attempts[-1].end(outcome, self._call.sent_at, self._call.first_byte_at)
            usage = self._call.usage
            if self._call.contradiction:
                replica.contradicting_answers += 1
            # Without an engine's count the estimate that was charged stands.
            tokens: tuple[int, int] | None = None
            if usage is not None and usage.exact and not self._call.probe:
                tokens = usage.prompt, usage.completion
                quote = self._ticket.quote
                if quote is not None and outcome is _SERVED:
                    self._meter.predicted_cached(quote.cached, usage.cached)
            self._ticket.end(self._clock(), outcome, tokens, gap_s=gap_s, adapter_failed=adapter_failed)

    def _fingerprint(self) -> int:
        if not self._hash:  # all of the body is read for it
            tenant, path = self._ticket.request.tenant, self._call.route.path
            self._hash = fingerprint(tenant, path, self._body)
        return self._hash

    def _ended_early(self, replica: ReplicaHandle, *, hung: bool) -> None:
        if len(self._raw) <= MAX_HASHED:
            self._suspects.ended_early(self._fingerprint(), replica.view.key, monotonic(), hung=hung)

    async def _is_excused(self) -> bool:
        """Whether its replicas were lost with others (their node was), which is known a moment later."""
        await asyncio.sleep(TOGETHER_S)
        return self._suspects.excused(self._fingerprint(), monotonic())

    def _runs_alone(self) -> bool:
        """Whether it is suspected to end engines, and is sent to one only; raises if it may not be sent."""
        alone = self._suspects.begin(self._fingerprint(), monotonic())
        if alone:
            self._ticket.request.begun = MAX_BEGUN - 1
        return alone

    async def _attempt(self, replica: ReplicaHandle) -> tuple[AttemptOutcome, Relay | None]:
        """Try one replica; a kept connection that was closed before the request arrived is replaced.

        Raises :class:`gateway.protocol.errors.Refused` when this machine can open no connection.
        """
        adapter, theirs = self._ticket.request.adapter, replica.their_model
        cache = replica.cache
        reports_cache = cache is not None and cache.wants_report(self._ticket.request)
        outgoing = self._body_for(adapter or theirs, reports_cache=reports_cache)
        rewrite = ModelNameRewrite(theirs, self._body.model) if theirs and not adapter else None
        head = self._head(replica, outgoing.size)
        proxied = self._call.proxied
        connection: UpstreamConnection | None = replica.take_connection() if proxied is None else proxied
        if proxied is not None:
            proxied.to(replica.replica.url)
        while True:
            if connection is None:
                try:
                    connection = await replica.pool.connect()
                except OSError as error:
                    if is_local_fault(error):
                        raise Refused(
                            Refusal.EXHAUSTED, "The gateway can open no more connections."
                        ) from error
            if connection is None:
                await self._in_its_turn()
                return AttemptOutcome.UNREACHABLE, None
            relay = self._relay(replica, connection, rewrite, strip_usage=outgoing.counts)
            sent = None if cache is None else cache.sent(self._ticket.request, self._prompt(theirs))
            outcome = _LEFT
            try:
                outcome = await relay.run(head, outgoing.parts)
            finally:
                replica.relays.discard(relay)
                if sent is not None:
                    sent.ended(served=outcome is _SERVED)
                if relay.lost:
                    self._meter.resets[replica.id] += 1
            if outcome is _SERVED:
                return outcome, relay
            await self._in_its_turn()
            if outcome is AttemptOutcome.STALE:
                connection = None
                continue
            died = outcome is _LOST and relay.reason is not Refusal.REPLICA_LOST
            if died and await self._accepts_connections(replica):
                relay.refused = Refused(Refusal.UPSTREAM_FAILED, "The replica closed the connection.")
                outcome = AttemptOutcome.DROPPED
            elif relay.reason is Refusal.UNKNOWN_MODEL and adapter:
                outcome = AttemptOutcome.DENIED  # it lacks the adapter, whatever else it serves
            return outcome, relay

    async def _in_its_turn(self) -> None:
        """Go on in a later turn of the event loop: hundreds of requests fail in one where a replica dies."""
        client = self._call.client
        await request_starts().wait(client[0] if client is not None else "")

    async def _accepts_connections(self, replica: ReplicaHandle) -> bool:
        is_alive = await replica.liveness.is_alive()
        await self._in_its_turn()
        return is_alive

    def _body_for(self, name: str, *, reports_cache: bool) -> UpstreamRequestBody:
        """The request's body, with ``name`` for its model or adapter, or the client's name if empty."""
        return upstream_body(
            self._call.route, self._body, self._raw, self._salt, name, reports_cache=reports_cache
        )

    def _prompt(self, theirs: str) -> TokenizablePrompt:
        """What the server reads, whose name for the model is ``theirs``."""
        adapter, body = self._ticket.request.adapter, self._body
        model = adapter or theirs or body.model
        return TokenizablePrompt(self._call.route, body, model=model, adapter=adapter, salt=self._salt)

    def _relay(
        self, replica: ReplicaHandle, connection: UpstreamConnection, rewrite: ModelNameRewrite | None, *,
        strip_usage: bool,
    ) -> Relay:  # fmt: skip
        """An attempt on ``connection``, which the watchdog observes."""
        validator = _UNUSED
        if self._call.streaming:
            validator = validator_of(self._call.route, self._body, strip_usage=strip_usage)
        relay = Relay(
            self._call, connection, validator, self._meter, self._first, rewrite=rewrite,
            tokens=event_tokens(self._body), loop=self._loop,
        )  # fmt: skip
        self._ticket.began(self._clock(), streams=relay.streams)
        replica.relays.add(relay)
        self._limit = replica.limit
        return relay

    def _first(self) -> None:
        now = monotonic()
        self._ticket.first(now)
        if self._limit is not None and self._call.streaming:
            self._limit.first(now - self._call.sent_at, time.time())

    def _whole_answer(self, limit: ConcurrencyLimit) -> None:
        """Tell the server's limit how long the answer took."""
        call = self._call
        if (usage := call.usage) is not None and usage.exact:
            tokens = usage.completion / max(1, self._body.choices)
            limit.whole(WholeAnswer(monotonic() - call.sent_at, tokens, time.time()))

    def _head(self, replica: ReplicaHandle, size: int) -> bytes:
        """The head of a request of ``size`` bytes: of the client's headers only those listed here."""
        call = self._call
        head = b"POST %b HTTP/1.1\r\n%bx-request-id: %b\r\ncontent-length: %d\r\n" % (
            call.route.upstream,
            replica.constant_head,
            call.upstream_id,
            size,
        )
        if not self._is_external:
            head += b"%b: %d\r\n" % (_PREFILL, self._ticket.pending)
            if call.adapter is not None:
                head += call.adapter.header
            head += prefix_headers(self._ticket.request, self._ticket.new_hashes)
        trace = call.trace
        if trace is not None:
            head += trace.header()
        for name in _FORWARDED_UNTRACED if trace is None else _FORWARDED:
            if (value := call.headers.get(name)) is not None and value.isascii() and b"\n" not in value:
                head += b"%b: %b\r\n" % (name, value)
        return head + b"\r\n"


def prefix_headers(request: Request, new_hashes: Sequence[int]) -> bytes:
    """The headers that name the prompt's prefixes: those that are new there, and how deep they are."""
    head, depths = b"", request.depths
    new = new_hashes[:MAX_NEW_HASHES]
    if new:
        head = b"%b: %b\r\n" % (_PREFIX, b",".join([b"%x" % value for value in new]))
    if depths:
        adapters = 1 if new_hashes and new_hashes[-1] & 1 else 0
        known = len(depths) - len(new_hashes) + adapters
        last = request.prefix[known - 1] if known else 0
        ends = (depths[known - 1] if known else 0, *depths[known : known + MAX_NEW_HASHES])
        listed = b",".join([b"%d" % end for end in ends])
        head += b"%b: %x,%b,%d\r\n" % (_DEPTHS, last, listed, request.prompt_tokens)
    return head


def validator_of(route: ProxyRoute, body: RequestBody, *, strip_usage: bool) -> SseValidator:
    """The parser of a stream of this route; ``strip_usage`` as in ``sse_validator.ChatValidator``."""
    if route.api is _RESPONSES:
        return ResponsesValidator()
    if route.api is _MESSAGES:
        return MessagesValidator()
    if route.runner is _GENERATE:
        return ChatValidator(body.choices, strip_usage=strip_usage)
    return SseValidator()
