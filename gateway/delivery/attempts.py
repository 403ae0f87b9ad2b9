"""Send a call to replicas until one serves it: what is retried, where, and how often."""

from __future__ import annotations

import asyncio
from time import monotonic, perf_counter

from gateway.call import Call
from gateway.delivery.relay import Relay, Verdict
from gateway.http.client import ClientConnection
from gateway.protocol.body import Body
from gateway.protocol.errors import Refused
from gateway.protocol.paths import Api, Route
from gateway.protocol.splice import UpstreamBody
from gateway.protocol.sse import ChatTail, MessagesTail, ResponsesTail, Tail
from gateway.queue.admission import Admission, Ticket
from gateway.queue.rejections import adapter_not_loadable, no_replica
from gateway.routing.ejection import is_own_fault
from gateway.routing.replica import ReplicaHandle
from gateway.telemetry.metrics import ModelCounters
from policy.errors import Refusal
from policy.routing.outlier_ejection import AttemptResult, BreakerState
from policy.types import EngineKind, Runner
from policy.wire.headers import PREFILL_HEADER, PREFIX_HEADER

# A connection that cannot be made, and a request that was begun, are tried elsewhere once.
MAX_CONNECTS = 2
MAX_BEGUN = 2
# An adapter that could not be loaded is tried elsewhere once.
MAX_LOADS = 2
# Hashes that other hosts are told of through the replica: 17 bytes of its request's head each.
MAX_NEWS = 64

_PREFILL, _PREFIX = PREFILL_HEADER.encode(), PREFIX_HEADER.encode()

_SIGNS = {
    Verdict.SERVED: AttemptResult.GOOD,
    Verdict.BROKEN: AttemptResult.BAD,
    Verdict.REJECTED: AttemptResult.NOTHING,
    Verdict.REFUSED: AttemptResult.NOTHING,
    Verdict.FAILED: AttemptResult.BAD,
    Verdict.LOST: AttemptResult.BAD,
    Verdict.STALE: AttemptResult.NOTHING,
    Verdict.SILENT: AttemptResult.BAD,
    Verdict.UNREACHABLE: AttemptResult.BAD,
    Verdict.LEFT: AttemptResult.NOTHING,
}


class Attempts:
    """One call with its body on its way to a replica."""

    __slots__ = (
        "_admission",
        "_asked_at",
        "_body",
        "_call",
        "_clock",
        "_health",
        "_link",
        "_meter",
        "_moves",
        "_outgoing",
        "_place",
        "_unloaded",
        "_unreached",
    )

    def __init__(
        self,
        admission: Admission,
        place: Ticket,
        call: Call,
        meter: ModelCounters,
        *,
        body: Body,
        outgoing: UpstreamBody,
    ) -> None:
        self._admission = admission
        self._place = place
        self._call = call
        self._body = body
        self._outgoing = outgoing
        self._meter = meter
        self._clock = asyncio.get_running_loop().time
        self._health = place.served.health
        self._link: ReplicaHandle | None = None
        self._asked_at = 0.0
        self._unreached = self._unloaded = 0
        self._moves = False

    async def run(self) -> None:
        """Until the client has an answer; raises :class:`gateway.protocol.errors.Refused` for a bad one.

        A replica that refused began nothing: the call stands in its old place again, uncharged. So it
        does once after a death, and after a connection that could not be made, while there is a replica
        in good standing; on others, and after 5xx or silence, its one retry is paid for by the budget.
        Two replicas at most begin it, so that a request which kills replicas kills no third.
        """
        self._health.request(self._clock())
        while True:
            link = await self._admitted()
            verdict, relay = await self._tried(link)
            self._meter.attempts[verdict] += 1
            if verdict is Verdict.SERVED:
                self._call.outcome = "ok"
                return
            if verdict is Verdict.BROKEN:
                self._call.outcome = Refusal.STREAM_BROKEN
                return
            self._consider(verdict, relay, link)

    async def _admitted(self) -> ReplicaHandle:
        """The replica to try next, with its slot taken."""
        served, asked = self._place.served, perf_counter()
        if served.hopeless(self._clock()):
            raise self._nobody()
        if (adapter := self._place.request.adapter) and served.cannot_load(adapter):
            raise adapter_not_loadable(served, adapter)
        link = await self._admission.admit(self._place)
        self._call.queued_s += perf_counter() - asked
        self._call.replica = link.label
        if self._moves:
            self._moves = False
            if not link.breaker.streak:
                self._health.moved()
            elif not self._health.may_retry(self._clock()):
                self._admission.release(self._place, link, whole=False)
                raise self._nobody()
        return link

    async def _tried(self, link: ReplicaHandle) -> tuple[Verdict, Relay | None]:
        """One attempt; what it says of the replica is told before its slot is given to another."""
        probe, sign, whole = link.probe(), AttemptResult.NOTHING, False
        try:
            verdict, relay = await self._attempt(link)
            sign, whole = _SIGNS[verdict], verdict is Verdict.SERVED
            if verdict is Verdict.REFUSED and relay is not None:
                if relay.reason is Refusal.ADAPTER_FAILED:
                    adapter = self._place.request.adapter
                    self._place.served.caused(adapter, relay.refused.message if relay.refused else "")
                    link.cannot_load(adapter)
                else:
                    link.refused(relay.reason)
            return verdict, relay
        except asyncio.CancelledError:
            self._meter.attempts[Verdict.LEFT] += 1
            raise
        finally:
            tell = self._health.probed if probe else self._health.tell
            tell(link.breaker, sign, self._clock())
            self._admission.release(self._place, link, whole=whole)

    def _consider(self, verdict: Verdict, relay: Relay | None, link: ReplicaHandle) -> None:
        """Return if the call may be tried again; raises :class:`gateway.protocol.errors.Refused` if not."""
        refused = relay.refused if relay is not None else None
        served = self._place.served
        if verdict is Verdict.REFUSED:
            if relay is not None and relay.reason is Refusal.ADAPTER_FAILED:
                self._unloaded += 1
                if self._unloaded >= MAX_LOADS:
                    raise adapter_not_loadable(served, self._place.request.adapter)
            return
        if verdict is Verdict.REJECTED and refused is not None:
            raise refused
        self._place.request.avoid.add(link.id)
        if verdict is Verdict.UNREACHABLE:
            self._unreached += 1
            if served.engine is EngineKind.EXTERNAL:
                link.heard(self._clock(), False)  # until it is asked again
            if self._unreached >= MAX_CONNECTS and any(other.admissible for other in served.links):
                raise self._nobody()
            self._moves = True
            return
        self._place.request.begun += 1
        if self._place.request.begun < MAX_BEGUN:
            # One that was taken out of rotation for its silence is as good as dead.
            hung = verdict is Verdict.SILENT and link.breaker.state is BreakerState.OPEN
            if verdict is Verdict.LOST or hung:
                self._moves = True
                return
            if self._admission.has_other(self._place) and self._health.may_retry(self._clock()):
                return
        if verdict is not Verdict.LOST and self._health.all_fail(self._clock()):
            raise self._nobody(refused)
        raise refused or Refused(
            Refusal.REPLICA_LOST, "Two replicas were lost while they held this request.", final=True
        )

    def _nobody(self, refused: Refused | None = None) -> Refused:
        """No replica of the model serves, and to wait for one would be in vain."""
        return no_replica(self._place.served.name, refused.retry_after_s if refused is not None else None)

    async def _attempt(self, link: ReplicaHandle) -> tuple[Verdict, Relay | None]:
        """Try one replica; a kept connection that turns out dead is replaced once, silently.

        Raises :class:`gateway.protocol.errors.Refused` when this machine can make no connection to anybody.
        """
        head = self._head(link)
        connection = link.pool.take()
        stale = False
        while True:
            if connection is None:
                try:
                    connection = await link.pool.connect()
                except OSError as error:
                    if is_own_fault(error):
                        raise Refused(
                            Refusal.EXHAUSTED, "The gateway can open no more connections."
                        ) from error
                    # After a stale connection the request itself may have been the end of the replica.
                    return (Verdict.LOST if stale else Verdict.UNREACHABLE), None
            relay = self._relay(link, connection)
            try:
                verdict = await relay.run(head, self._outgoing.parts)
            finally:
                link.relays.discard(relay)
            if verdict is not Verdict.STALE or stale:
                return verdict, relay
            connection, stale = None, True

    def _relay(self, link: ReplicaHandle, connection: ClientConnection) -> Relay:
        """An attempt on ``connection``, where the watchdog sees it."""
        tail = tail_of(self._call.route, self._body, strip_usage=self._outgoing.counts)
        relay = Relay(self._call, connection, tail, self._meter)
        self._link, self._asked_at = link, self._clock()
        relay.on_first = self._first
        if not relay.streams:
            self._admission.unseen(self._place, link)
        link.relays.add(relay)
        return relay

    def _first(self) -> None:
        """The first token came; an answer that does not stream comes whole, and says not when."""
        assert self._link is not None
        took_s = monotonic() - self._asked_at if self._call.streaming else None
        self._admission.first_token(self._place, self._link, took_s)

    def _head(self, link: ReplicaHandle) -> bytes:
        """The request's head: nothing of the client's but what this list names."""
        call = self._call
        head = b"POST %b HTTP/1.1\r\n%bx-request-id: %b\r\ncontent-length: %d\r\n" % (
            call.route.upstream,
            link.constant_head,
            call.upstream_id,
            self._outgoing.size,
        )
        place = self._place
        if place.served.engine is not EngineKind.EXTERNAL:
            head += b"%b: %d\r\n" % (_PREFILL, place.pending)
            if call.adapter is not None:
                head += call.adapter.header
            if place.news:
                news = b",".join([b"%x" % value for value in place.news[:MAX_NEWS]])
                head += b"%b: %b\r\n" % (_PREFIX, news)
        for name in (b"accept", b"anthropic-version"):
            if (value := call.headers.get(name)) is not None and value.isascii() and b"\n" not in value:
                head += b"%b: %b\r\n" % (name, value)
        return head + b"\r\n"


def tail_of(route: Route, body: Body, *, strip_usage: bool) -> Tail:
    """What follows a stream of this route to its end; ``strip_usage`` as in
    :class:`gateway.protocol.sse.ChatTail`."""
    if route.api is Api.RESPONSES:
        return ResponsesTail()
    if route.api is Api.MESSAGES:
        return MessagesTail()
    if route.runner is Runner.GENERATE:
        return ChatTail(body.choices, strip_usage=strip_usage)
    return Tail()
