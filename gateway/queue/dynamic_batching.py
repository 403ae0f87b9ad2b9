"""Coalescing: concurrent requests with short inputs are served by one upstream call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from starlette.types import Message

from gateway.http.asgi_exchange import SENT
from gateway.protocol import body as bodies
from gateway.protocol.body_batching import SubRequest, join, split, sub_request_of
from gateway.protocol.errors import Refused
from gateway.protocol.json_structure import JsonPieceReader
from gateway.protocol.usage import TokenUsage, usage_of_answer
from gateway.request_context import RequestContext
from gateway.routing.fleet import ServedModel
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.structured_log import StructuredLog
from policy.admission.dynamic_batching import BatchingWindows, RequestBatch
from policy.config.deployment import CoalesceConfig
from policy.request import Request
from policy.wire.headers import REPLICA_HEADER

# The timer's clock has a coarser tick than a window, and may fire a hair early.
_TICK_S = 0.001
# The largest answer of a shared call that is split: 256 vectors of 4096 numbers as text.
MAX_ANSWER = 16 * 1024 * 1024
# A shared call counts as one of the two attempts that may begin a request.
_ONE_TRY = 1
_REPLICA = REPLICA_HEADER.encode()


@dataclass(slots=True, eq=False)
class _Member:
    """A request in a window. ``turn`` yields its answer, or a batch that it is alone in and has to end
    when it is done, or ``None`` when the call it shared has failed and it goes alone after all.
    """

    share: SubRequest
    call: RequestContext
    served: ServedModel
    request: Request
    turn: asyncio.Future[bytes | RequestBatch[_Member] | None]


Deliver = Callable[[RequestContext, ServedModel, Request, bodies.RequestBody, bytes], Awaitable[None]]


class DynamicBatcher:
    """The coalescing windows of one worker. ``deliver`` serves one call or raises its refusal."""

    def __init__(
        self, deliver: Deliver, metrics: WorkerMetrics, log: StructuredLog, pieces: JsonPieceReader
    ) -> None:
        self._deliver = deliver
        self._metrics = metrics
        self._log = log
        self._pieces = pieces
        self._windows: BatchingWindows[_Member] = BatchingWindows()
        self._calls: dict[RequestBatch[_Member], asyncio.Task[Sequence[bytes | None]]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def around(
        self,
        call: RequestContext,
        served: ServedModel,
        request: Request,
        body: bodies.RequestBody,
        raw: bytes,
        *,
        bounds: CoalesceConfig,
    ) -> None:
        """Deliver ``call``, together with others of its kind where possible."""
        alone = partial(self._deliver, call, served, request, body, raw)
        share = sub_request_of(call.route, body, raw, request.tenant, bounds, adapter=request.adapter)
        if share is None:
            await alone()
        else:
            await self.serve(share, call, served, request, bounds=bounds, alone=alone)

    async def serve(
        self,
        share: SubRequest,
        call: RequestContext,
        served: ServedModel,
        request: Request,
        *,
        bounds: CoalesceConfig,
        alone: Callable[[], Awaitable[None]],
    ) -> None:
        """Answer ``call`` from a shared call, or by ``alone`` if it is the only one.

        If the shared call fails, each member is delivered by itself and gets its own answer or error.
        """
        member = _Member(share, call, served, request, self._loop.create_future())
        for batch in self._windows.arrive(
            share.group,
            member,
            share.count,
            self._loop.time(),
            window_s=bounds.window_s,
            most=bounds.max_inputs,
        ):
            self._depart(batch)
        self._arm()
        try:
            turn = await member.turn
        except asyncio.CancelledError:
            self._withdraw(member)
            raise
        if isinstance(turn, bytes):
            call.outcome = "ok"
            if (charge := call.charge) is not None:
                charge.begin()
                charge.end(_usage_of(call, request, turn))
            headers = [(b"content-type", b"application/json"), (_REPLICA, call.replica)]
            await call.answer(200, headers, turn)
        elif turn is None:
            await alone()
        else:
            try:
                await alone()
            finally:
                self._end(turn)

    def _depart(self, batch: RequestBatch[_Member]) -> None:
        if len(batch.members) > 1:
            task = self._calls[batch] = asyncio.create_task(
                self._share(list(batch.members)), name="coalesced"
            )
            # A task that is cancelled before it starts runs no handler of its own.
            task.add_done_callback(partial(self._returned, batch))
            return
        (member,) = batch.members
        if member.turn.done():  # its client disconnected, and its task has not run yet
            self._end(batch)
        else:
            member.turn.set_result(batch)

    async def _share(self, members: Sequence[_Member]) -> Sequence[bytes | None]:
        """The answer to each, or ``None`` for all when the shared call failed."""
        request = _together(members)
        try:
            return await self._ask(members, request)
        except Exception as error:  # noqa: BLE001 - each tries by itself, and has its own error then
            if not isinstance(error, Refused):
                self._log.warning("shared_call_failed", cause=error, requests=len(members))
            for member in members:
                member.request.avoid |= request.avoid
                member.request.begun = request.begun - _ONE_TRY
            return [None] * len(members)

    def _returned(self, batch: RequestBatch[_Member], task: asyncio.Task[Sequence[bytes | None]]) -> None:
        del self._calls[batch]
        answers = [None] * len(batch.members) if task.cancelled() else task.result()
        for member, answer in zip(batch.members, answers, strict=True):
            if not member.turn.done():
                member.turn.set_result(answer)
        self._end(batch)

    async def _ask(self, members: Sequence[_Member], request: Request) -> list[bytes]:
        """One answer each; raises whatever goes wrong with the shared call."""
        first = members[0]
        shares = [member.share for member in members]
        raw = join(shares)
        request.size += len(raw)
        inbox = _Inbox()
        call = RequestContext(
            first.call.route,
            {"headers": []},
            inbox.receive,
            inbox.send,
            first.call.deadlines,
            pieces=self._pieces,
        )
        call.adapter, call.trace = first.call.adapter, first.call.trace
        is_large = len(raw) > bodies.MAX_DECODED
        body = await bodies.read_large(raw, self._pieces) if is_large else bodies.read(raw)
        await self._deliver(call, first.served, request, body, raw)
        ids = [member.call.upstream_id for member in members]
        answers = await split(inbox.answer(), shares, call.upstream_id, ids, self._pieces)
        meter = self._metrics.model(first.served.name)
        meter.coalesced_calls += 1
        meter.coalesced_requests += len(members)
        if (usage := call.usage) is not None and not call.by_fallback:
            meter.totals.count_tokens(usage.prompt, usage.cached, usage.completion)
        for member in members:
            member.call.replica, member.call.by_fallback = call.replica, call.by_fallback
            member.call.queued_s = call.queued_s
            member.call.contradiction = call.contradiction
            if (trace := member.call.trace) is not None and call.trace is not None:
                trace.attempts = call.trace.attempts
        return answers

    def _withdraw(self, member: _Member) -> None:
        """A client has left: remove it; a shared call without clients is cancelled."""
        if self._windows.withdraw(member.share.group, member):
            return
        if not member.turn.cancelled() and isinstance(batch := member.turn.result(), RequestBatch):
            self._end(batch)
            return
        for batch, task in self._calls.items():
            if member in batch.members and all(other.turn.done() for other in batch.members):
                task.cancel()

    def _end(self, batch: RequestBatch[_Member]) -> None:
        following = self._windows.ended(batch)
        batch.members.clear()  # that of a lone request has the batch as its turn: a cycle
        if following is not None:
            self._depart(following)

    def _arm(self) -> None:
        if self._timer is None and (due := self._windows.next_due) is not None:
            self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        for batch in self._windows.due(self._loop.time() + _TICK_S):
            self._depart(batch)
        self._arm()


class _Inbox:
    """The client side of a shared call, which collects the answer."""

    def __init__(self) -> None:
        self._status = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._complete = False

    async def receive(self) -> Message:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        else:
            part: bytes = message.get("body", b"")
            self._size += len(part)
            if self._size <= MAX_ANSWER:
                self._parts.append(part)
            self._complete = not message.get("more_body", False)
        return SENT

    def answer(self) -> bytes:
        """The body of a complete answer of status 200; raises ``ValueError`` for any other."""
        if self._status != 200 or not self._complete:
            raise ValueError(f"the shared call ended with status {self._status}")
        if self._size > MAX_ANSWER:
            raise ValueError(f"the answer of the shared call has more than {MAX_ANSWER} bytes")
        return b"".join(self._parts)


def _usage_of(call: RequestContext, request: Request, answer: bytes) -> TokenUsage:
    """The usage in a member's part of a shared call's ``answer``, unless that contradicts the shared call."""
    usage = None if call.contradiction else usage_of_answer(answer)
    return usage or TokenUsage(request.prompt_tokens, 0, request.output_tokens, exact=False)


def _together(members: Sequence[_Member]) -> Request:
    """The shared call for admission and routing: the sum of its members, with the earliest deadline.

    Its prefix is their common one. It may begin on one replica alone: an attempt by a single member is then
    the second.
    """
    requests = [member.request for member in members]
    first = requests[0]
    prefix = tuple(
        hashes[0]
        for hashes in takewhile(_alike, zip(*(request.prefix for request in requests), strict=False))
    )
    return Request(
        first.model,
        first.tenant,
        first.priority,
        first.adapter,
        first.adapter_key,
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        output_tokens=sum(request.output_tokens for request in requests),
        prefix=prefix,
        depths=first.depths[: len(prefix)],
        session=first.session,
        size=sum(request.size for request in requests),
        arrived=min(request.arrived for request in requests),
        deadline=min(request.deadline for request in requests),
        begun=_ONE_TRY,
        prompt_bytes=sum(request.prompt_bytes for request in requests),
    )


def _alike(hashes: tuple[int, ...]) -> bool:
    return hashes.count(hashes[0]) == len(hashes)
