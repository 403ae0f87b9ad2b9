"""Send a call to replicas until one serves it: what is retried, where, and how often."""

from __future__ import annotations

from time import perf_counter

from gateway.admission import Admission, Place
from gateway.body import Body
from gateway.call import Call
from gateway.errors import Refused
from gateway.metrics import ModelMeter
from gateway.relay import Relay, Verdict
from gateway.replicas import Link
from gateway.sse import ChatTail, MessagesTail, ResponsesTail, Tail
from gateway.surface import Api, Route
from gateway.upstream import Connection
from policy.errors import Refusal
from policy.types import EngineKind, Runner


class Delivery:
    """One call with its body on its way to a replica."""

    __slots__ = ("_admission", "_body", "_call", "_meter", "_place", "_raw")

    def __init__(
        self,
        admission: Admission,
        place: Place,
        call: Call,
        meter: ModelMeter,
        *,
        body: Body,
        raw: bytes,
    ) -> None:
        self._admission = admission
        self._place = place
        self._call = call
        self._body = body
        self._raw = raw
        self._meter = meter

    async def run(self) -> None:
        """Until the client has an answer; raises :class:`gateway.errors.Refused` for a bad one.

        A replica that refused, or that could not be reached, began nothing: the call stands in its
        old place again, uncharged. One that died under it or answered 5xx costs it its one retry,
        so a request that kills replicas touches two at most.
        """
        charged = False
        while True:
            asked = perf_counter()
            link = await self._admission.admit(self._place)
            self._call.queued_s += perf_counter() - asked
            self._call.replica = link.label
            try:
                verdict, relay = await self._attempt(link)
                self._tell(link, verdict, relay)
            finally:
                self._admission.release(self._place.served, link)
            self._meter.attempts[verdict] += 1
            if verdict is Verdict.SERVED:
                self._call.outcome = "ok"
                return
            if verdict is Verdict.BROKEN:
                self._call.outcome = Refusal.STREAM_BROKEN
                return
            if verdict is Verdict.REFUSED or verdict is Verdict.UNREACHABLE:
                continue
            refused = relay.refused if relay is not None else None
            if verdict is Verdict.REJECTED and refused is not None:
                raise refused
            self._place.request.avoid.add(link.id)
            if charged or (verdict is Verdict.FAILED and not self._admission.has_other(self._place)):
                raise refused or Refused(
                    Refusal.REPLICA_LOST, "Two replicas were lost while they held this request.", final=True
                )
            charged = True

    def _tell(self, link: Link, verdict: Verdict, relay: Relay | None) -> None:
        """What the attempt says about the replica, before its slot is given to another."""
        if verdict is Verdict.REFUSED and relay is not None:
            link.refused(relay.reason)
        elif verdict is Verdict.UNREACHABLE:
            link.lost()
        elif verdict is Verdict.LOST and self._place.served.engine is not EngineKind.EXTERNAL:
            # Its own load stream readmits it with the next line, within a second if it lives.
            link.lost()

    async def _attempt(self, link: Link) -> tuple[Verdict, Relay | None]:
        """Try one replica; a kept connection that turns out dead is replaced once, silently."""
        head = self._head(link)
        connection = link.pool.take()
        if connection is not None:
            relay = self._relay(connection)
            verdict = await relay.run(head, self._raw)
            if verdict is not Verdict.STALE:
                return verdict, relay
        try:
            fresh = await link.pool.connect()
        except OSError:
            # After a stale connection the request itself may have been the end of the replica.
            return (Verdict.UNREACHABLE if connection is None else Verdict.LOST), None
        relay = self._relay(fresh)
        return await relay.run(head, self._raw), relay

    def _relay(self, connection: Connection) -> Relay:
        return Relay(self._call, connection, tail_of(self._call.route, self._body), self._meter)

    def _head(self, link: Link) -> bytes:
        """The request's head: nothing of the client's but what this list names."""
        call = self._call
        head = b"POST %b HTTP/1.1\r\n%bx-request-id: %b\r\ncontent-length: %d\r\n" % (
            call.route.upstream,
            link.constant_head,
            call.upstream_id,
            len(self._raw),
        )
        for name in (b"accept", b"anthropic-version"):
            if (value := call.headers.get(name)) is not None and value.isascii() and b"\n" not in value:
                head += b"%b: %b\r\n" % (name, value)
        return head + b"\r\n"


def tail_of(route: Route, body: Body) -> Tail:
    """What follows a stream of this route to its end."""
    if route.api is Api.RESPONSES:
        return ResponsesTail()
    if route.api is Api.MESSAGES:
        return MessagesTail()
    if route.runner is Runner.GENERATE:
        return ChatTail(body.choices)
    return Tail()
