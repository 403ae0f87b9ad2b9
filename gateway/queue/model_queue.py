"""Drives the dispatcher of one model on the event loop: its timer, its futures and its metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Set
from typing import Final

from gateway.protocol.errors import Refused
from gateway.queue.replica_pool import ModelReplicaPool, SharedTokenCounts
from gateway.routing.fleet import ServedModel
from gateway.routing.replica_handle import ReplicaHandle, UnobservedPrefill
from gateway.telemetry.queue_metrics import QueueCounters
from policy.admission import dispatcher as dispatching
from policy.admission.dispatcher import Dispatcher
from policy.admission.retry_policy import AttemptOutcome, Rejection, RejectionCause
from policy.errors import Refusal
from policy.request import Request
from policy.routing.replica_health import ReplicaHealth
from policy.routing.router import PickResult

# Replicas report hundreds of times a second; waiting requests are offered slots at most this often.
REST_S: Final = 0.004
# The timer's clock has a coarser tick than a deadline, and may fire a hair early.
TIMER_TICK_S: Final = 0.002
# After this, a replica that failed to load an adapter may be asked for it again.
ADAPTER_RETRY_S: Final = 5
_LOST: Final = "Two replicas were lost while they held this request."
_COUNTED_ON_ARRIVAL: Final = frozenset({RejectionCause.LATE, RejectionCause.FULL, RejectionCause.DEADLINE})


class QueueTicket(dispatching.DispatchTicket[ReplicaHandle]):
    """A request's ticket in this worker; :meth:`wait` is ``enter`` for a task."""

    def __init__(self, queue: ModelQueue, request: Request) -> None:
        super().__init__(queue.dispatcher, request)
        self._queue = queue
        self._granted: asyncio.Future[None] | None = None
        self._prefill: UnobservedPrefill | None = None

    @property
    def served(self) -> ServedModel:
        return self._queue.served

    @property
    def has_waited(self) -> bool:
        return self._granted is not None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._queue.loop

    @property
    def decision(self) -> PickResult | None:
        """The router's decision that :attr:`quote` is of, if it is one of the last."""
        return self._queue.routers.decision_on(self.request)

    async def wait(self) -> ReplicaHandle:
        """The replica to send the request to, with its slot taken; a retry keeps its place in the queue.

        Raises :class:`gateway.protocol.errors.Refused` if the request is rejected.
        """
        queue = self._queue
        self.enter(queue.clock())
        if self.queued:
            self._granted = asyncio.get_running_loop().create_future()
            queue.arm()
            try:
                await self._granted
            except asyncio.CancelledError:
                self.leave(queue.clock())
                raise
        elif self.rejection is not None:
            queue.count(self.rejection, waited=False)
        if self.rejection is not None:
            raise self.refused()
        assert self.replica is not None
        return self.replica

    def refused(self, upstream: Refused | None = None) -> Refused:
        """The answer to its client, once it is rejected; ``upstream`` is that of the last replica."""
        assert self.rejection is not None
        queued = len(self.dispatcher.queue)
        return _refused_by(self.rejection, self.served, self.request.adapter, queued, upstream)

    def is_abandoned(self) -> bool:
        return self._granted is None or self._granted.done()

    def resolve(self) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    def began(self, at: float, *, streams: bool = True) -> None:
        """Without a stream the first token is not seen: the prefill counts as over at its predicted end."""
        super().began(at, streams=streams)
        if not streams and self.pending and self.replica is not None and self.quote is not None:
            self._prefill = self.replica.expect_prefill_end(self.pending, at + self.quote.total)
            self.pending = 0

    def end(
        self, at: float, outcome: AttemptOutcome, tokens: tuple[int, int] | None = None, *,
        gap_s: float = 0.0, adapter_failed: bool = False,
    ) -> None:  # fmt: skip
        if self._prefill is not None and self.replica is not None:
            self.replica.end_prefill(self._prefill)
            self._prefill = None
        super().end(at, outcome, tokens, gap_s=gap_s, adapter_failed=adapter_failed)


class ModelQueue:
    """One model's queue in this worker."""

    def __init__(
        self,
        pool: ModelReplicaPool,
        health: ReplicaHealth,
        meter: QueueCounters,
        weight: Callable[[str], float],
        peers: SharedTokenCounts | None,
    ) -> None:
        self.served = pool.served
        self.routers = pool.routers
        self.dispatcher: Dispatcher[ReplicaHandle] = Dispatcher(
            pool, health, weight=weight, peers=peers, resolved=self._resolved, changed=self._changed
        )
        self._meter = meter
        self.loop = asyncio.get_running_loop()
        self.clock = self.loop.time
        self._timer: asyncio.Handle | None = None
        self._timer_at = math.inf
        self._offering: asyncio.Handle | None = None
        self._dismissing: asyncio.Handle | None = None
        self._giving_up: asyncio.Handle | None = None
        self._unloadable: set[str] = set()

    def replica_changed(self) -> None:
        """A replica changed: offer free slots to waiting requests, if any may be free."""
        if self.dispatcher.waiting and self.clock() - self.dispatcher.idle_since >= REST_S:
            self._offer_soon()

    def dismiss(self) -> None:
        """No replica is up or to come: reject all that wait, over several turns of the event loop."""
        if not self.dispatcher.dismiss(self.clock()) and self._dismissing is None:
            self._dismissing = self.loop.call_soon(self._dismiss_rest)
        self._publish()

    def give_up(self, adapters: Set[str]) -> None:
        """Reject what waits for those of ``adapters`` that no replica can load, over several turns."""
        self._unloadable |= adapters & self.dispatcher.classes.by_adapter.keys()
        if self._giving_up is None:
            self._give_up_some()

    def count(self, rejection: Rejection, *, waited: bool) -> None:
        """Count a rejection by the queue; retries that are given up are not the queue's."""
        cause = rejection.cause
        if cause is RejectionCause.DISPLACED:
            self._meter.displaced += 1
        elif cause in _COUNTED_ON_ARRIVAL or (waited and cause is not RejectionCause.RETRIES_SPENT):
            self._meter.refused[rejection.refusal] += 1

    def arm(self) -> None:
        at = self.dispatcher.due_at(self.clock())
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
            self._timer = None
        if self.dispatcher.waiting:
            # uvloop returns a handle without ``when`` for an instant that is due already.
            self._timer, self._timer_at = self.loop.call_at(at, self._wake), at

    def _dismiss_rest(self) -> None:
        self._dismissing = None
        if self.dispatcher.pool.unavailable(self.clock()):  # no replica has come back meanwhile
            self.dismiss()

    def _give_up_some(self) -> None:
        self._giving_up = None
        if not self.dispatcher.give_up(self._unloadable, self.clock()):
            self._giving_up = self.loop.call_soon(self._give_up_some)
        self._publish()

    def _resolved(self, ticket: dispatching.DispatchTicket[ReplicaHandle]) -> None:
        assert isinstance(ticket, QueueTicket)
        if ticket.rejection is None:
            waited_s = self.clock() - ticket.request.arrived
            self._meter.count_wait(waited_s, ticket.expected_wait_s)
        else:
            self.count(ticket.rejection, waited=True)
        ticket.resolve()

    def _changed(self) -> None:
        self._publish()
        self._offer_soon()

    def _offer_soon(self) -> None:
        # Requests that end in one step of an engine free their slots together: choose for all of them.
        if self._offering is None:
            self._offering = self.loop.call_soon(self._offer)

    def _offer(self) -> None:
        self._offering = None
        if not self.dispatcher.offer(self.clock()):
            self._offer_soon()
        self._publish()

    def _publish(self) -> None:
        queue, meter = self.dispatcher.queue, self._meter
        for priority in meter.depth:
            meter.depth[priority] = queue.depth(priority)
        meter.size = queue.size

    def _wake(self) -> None:
        self._timer = None
        at = self.clock()
        all_expired = self.dispatcher.expire(at + TIMER_TICK_S)
        self.dispatcher.queue.count_peers()
        # One offer in a turn of the event loop, and none while the timer has more to expire in the next turn.
        if all_expired and self._offering is None:
            self._offer()
        else:
            self._publish()
        self.arm()


def _refused_by(
    rejection: Rejection, served: ServedModel, adapter: str, queued: int, upstream: Refused | None = None
) -> Refused:
    """The answer to a rejected request; ``upstream`` is the last replica's, ``queued`` the queue's length."""
    name, cause, retry_after_s = served.name, rejection.cause, rejection.retry_after_s
    if upstream is not None and cause in (RejectionCause.REJECTED, RejectionCause.FAILED):
        return upstream
    if cause is RejectionCause.ADAPTER:
        reason = served.load_failures.get(adapter)
        text = f"No replica of {name} could load the adapter '{adapter}'{f' ({reason})' if reason else ''}."
        return Refused(rejection.refusal, text, param="model", status=503, retry_after_s=ADAPTER_RETRY_S)
    if cause is RejectionCause.LATE:
        text = f"{queued} requests wait for {name}: this one would not be served before its deadline."
    elif cause is RejectionCause.FULL:
        text = f"{queued} requests already wait for {name}."
    elif cause is RejectionCause.DISPLACED:
        text = f"The queue for {name} is full, and this request made room for another."
    elif cause is RejectionCause.DEADLINE:
        was = "had room" if rejection.refusal is Refusal.DEADLINE else "was ready"
        text = f"No replica of {name} {was} before the request's deadline."
    elif cause in (RejectionCause.UNAVAILABLE, RejectionCause.RETRIES_SPENT):
        text = f"No replica of {name} serves at present."
        if upstream is not None:
            retry_after_s = upstream.retry_after_s
    else:
        text = _LOST
    return Refused(rejection.refusal, text, retry_after_s=retry_after_s, final=cause is RejectionCause.FAILED)
