"""How attempts end, and which requests are tried again, on which replicas and at whose cost."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from policy.admission.replica_pool_interface import Replica, ReplicaPool
from policy.errors import Refusal
from policy.request import Request
from policy.routing.replica_health import AttemptResult, Breaker, BreakerState, ReplicaHealth

# Failed connections, begun attempts and failed adapter loads after which a request is not tried again.
MAX_CONNECTS = 2
MAX_BEGUN = 2
MAX_LOADS = 2


class AttemptOutcome(StrEnum):
    """How an attempt on a replica ended.

    ``SERVED``: the client has its answer. ``BROKEN``: the answer broke after parts of it had been sent. After
    the others the client has received nothing: ``REJECTED`` is the request's own fault, ``REFUSED`` means
    that the replica did not begin it, ``FAILED`` is an answer of 5xx or an invalid one, ``LOST`` a connection
    that died under the request, ``STALE`` a kept connection that was already closed, ``UNREACHABLE`` no
    connection, ``SILENT`` no sign of life before the timeout, after which the connection was closed.
    ``LEFT``: the client has left.
    """

    SERVED = "served"
    BROKEN = "broken"
    REJECTED = "rejected"
    REFUSED = "refused"
    FAILED = "failed"
    LOST = "lost"
    SILENT = "silent"
    STALE = "stale"
    UNREACHABLE = "unreachable"
    LEFT = "left"


# What an outcome says of the replica; nothing where it is not listed.
RESULTS = {
    AttemptOutcome.SERVED: AttemptResult.GOOD,
    AttemptOutcome.BROKEN: AttemptResult.BAD,
    AttemptOutcome.FAILED: AttemptResult.BAD,
    AttemptOutcome.LOST: AttemptResult.BAD,
    AttemptOutcome.SILENT: AttemptResult.BAD,
    AttemptOutcome.UNREACHABLE: AttemptResult.BAD,
}


class Cause(StrEnum):
    """Why a ticket is rejected (closed: a new cause is a new member)."""

    UNAVAILABLE = "unavailable"  # no replica is up, and none is starting
    RETRIES_SPENT = "retries_spent"  # no replica could be connected to, or the retry budget is spent
    ADAPTER = "adapter"  # no replica that is up can load its adapter
    DEADLINE = "deadline"  # its deadline passed before a replica had room
    LATE = "late"  # on arrival: it would not be served before its deadline
    FULL = "full"  # on arrival: the queue is full
    DISPLACED = "displaced"  # it made room in the queue for another
    REJECTED = "rejected"  # the replica found fault with the request itself
    FAILED = "failed"  # as many replicas failed it as may


class Rejection(NamedTuple):
    """A ticket will not be served. ``retry_after_s`` is set where it is known when it may be."""

    cause: Cause
    refusal: Refusal
    retry_after_s: int | None = None


class RetryState:
    """The failed attempts of one request, and the rule what follows from another one.

    A replica that refused began nothing, so a retry is free. A connection that could not be made, and the
    first death of a replica under the request, allow a move that is free if it leads to a replica in good
    standing. Other retries are charged to the retry budget. At most :data:`MAX_BEGUN` replicas begin a
    request: one that kills replicas kills no third.
    """

    __slots__ = ("_connects", "_loads", "_moving")

    def __init__(self) -> None:
        self._connects = self._loads = 0
        self._moving = False

    def after(
        self,
        outcome: AttemptOutcome,
        request: Request,
        at: float,
        *,
        replica: str,
        breaker: Breaker,
        pool: ReplicaPool[Replica],
        health: ReplicaHealth,
        adapter_failed: bool,
    ) -> Rejection | None:
        """Why a request is rejected whose attempt on ``replica`` ended so; ``None`` if it may be retried."""
        if outcome is AttemptOutcome.REFUSED:
            if adapter_failed:
                self._loads += 1
                if self._loads >= MAX_LOADS:
                    return Rejection(Cause.ADAPTER, Refusal.ADAPTER_FAILED)
            return None
        if outcome is AttemptOutcome.REJECTED:
            return Rejection(Cause.REJECTED, Refusal.BAD_REQUEST)
        request.avoid.add(replica)
        if outcome is AttemptOutcome.UNREACHABLE:
            self._connects += 1
            if self._connects >= MAX_CONNECTS and pool.candidates():
                return Rejection(Cause.RETRIES_SPENT, Refusal.NO_REPLICA)
            self._moving = True
            return None
        request.begun += 1
        if request.begun < MAX_BEGUN:
            # A replica that was ejected since it made no progress is as good as dead.
            hung = outcome is AttemptOutcome.SILENT and breaker.state is BreakerState.OPEN
            if outcome is AttemptOutcome.LOST or hung:
                self._moving = True
                return None
            if _has_other(request, pool) and health.may_retry(at):
                return None
        if outcome is not AttemptOutcome.LOST and health.all_fail(at):
            return Rejection(Cause.RETRIES_SPENT, Refusal.NO_REPLICA)
        return Rejection(Cause.FAILED, Refusal.REPLICA_LOST)

    def may_move(self, to: Breaker, health: ReplicaHealth, at: float) -> bool:
        """Whether a request that has a slot may be sent to the replica of the breaker ``to``."""
        if not self._moving:
            return True
        self._moving = False
        if to.streak:
            return health.may_retry(at)
        health.moved()
        return True


def _has_other(request: Request, pool: ReplicaPool[Replica]) -> bool:
    """Whether a replica that has not failed ``request`` could take it now."""
    return any(
        each.id not in request.avoid and pool.serves(each, request.adapter) for each in pool.candidates()
    )
