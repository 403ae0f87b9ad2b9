"""The retry rule: how attempts end, which requests are tried again, on which replicas and at whose cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from policy.admission.replica_pool_interface import DispatchableReplica, ReplicaPool
from policy.errors import Refusal
from policy.request import Request
from policy.routing.cost import Candidate
from policy.routing.replica_health import AttemptResult, CircuitBreaker, CircuitBreakerState, ReplicaHealth

# Attempts on the only replica, replicas that a request may have harmed, and failed adapter loads after which
# it is not tried again.
MAX_ALONE: Final = 2
MAX_BEGUN: Final = 2
MAX_LOADS: Final = 2


class AttemptOutcome(StrEnum):
    """How an attempt on a replica ended.

    ``SERVED``: the client has its answer. ``BROKEN``: the answer broke after parts of it had been sent. After
    the others the client has received nothing: ``REJECTED`` is the request's own fault, ``REFUSED`` means
    that the replica did not begin it, ``DECLINED`` an answer by which it does not serve what it should (its
    credentials or its model are wrong, it limits the rate, it is overloaded), ``DENIED`` one that denies the
    route, ``FAILED`` another error or an invalid answer, ``LOST`` a connection that died together with its
    replica, ``DROPPED`` one that died while the replica accepts others, ``STALE`` a kept connection that was
    closed before the request arrived, ``UNREACHABLE`` no connection, ``SILENT`` no sign of life before the
    timeout, after which the connection was closed. ``LEFT``: the client has left, or its stream was cut while
    it did not read.
    """

    SERVED = "served"
    BROKEN = "broken"
    REJECTED = "rejected"
    REFUSED = "refused"
    DECLINED = "declined"
    DENIED = "denied"
    FAILED = "failed"
    LOST = "lost"
    DROPPED = "dropped"
    SILENT = "silent"
    STALE = "stale"
    UNREACHABLE = "unreachable"
    LEFT = "left"


# What an outcome says of the replica; nothing where it is not listed.
RESULTS: Final = {
    AttemptOutcome.SERVED: AttemptResult.GOOD,
    AttemptOutcome.BROKEN: AttemptResult.BAD,
    AttemptOutcome.DECLINED: AttemptResult.BAD,
    AttemptOutcome.FAILED: AttemptResult.BAD,
    AttemptOutcome.LOST: AttemptResult.BAD,
    AttemptOutcome.DROPPED: AttemptResult.BAD,
    AttemptOutcome.SILENT: AttemptResult.BAD,
    AttemptOutcome.UNREACHABLE: AttemptResult.BAD,
}
# The request may have caused it: certainly not refuted, or only if the replica serves others well.
_HARMFUL: Final = frozenset({AttemptOutcome.LOST, AttemptOutcome.SILENT})
_OWN_FAULT: Final = frozenset({AttemptOutcome.FAILED, AttemptOutcome.DENIED})
# Faults that may have passed: the same replica is tried again if there is no other.
_PASSING: Final = frozenset({AttemptOutcome.LOST, AttemptOutcome.DROPPED, AttemptOutcome.UNREACHABLE})


class RejectionCause(StrEnum):
    """Why a ticket is rejected (closed: a new cause is a new member)."""

    UNAVAILABLE = "unavailable"  # no replica is up, and none is starting
    RETRIES_SPENT = "retries_spent"  # no replica is left to try, or the retry budget is spent
    ADAPTER = "adapter"  # no replica that is up can load its adapter
    DEADLINE = "deadline"  # its deadline passed before a replica had room
    LATE = "late"  # on arrival: it would not be served before its deadline
    FULL = "full"  # on arrival: the queue is full
    DISPLACED = "displaced"  # it made room in the queue for another
    REJECTED = "rejected"  # the replica found fault with the request itself
    FAILED = "failed"  # all replicas failed it, or as many as may


class Rejection(NamedTuple):
    """A ticket will not be served. ``retry_after_s`` is set where it is known when it may be."""

    cause: RejectionCause
    refusal: Refusal
    retry_after_s: int | None = None


class RetryState:
    """The failed attempts of one request, and the rule what follows from another one.

    A replica that refused began nothing, so a retry is free. Otherwise the request goes on as long as there
    are replicas that it has not tried. That is free while it leads to a replica in good standing, of which
    there are only as many failures as the retry budget allows anyway; other retries are charged to the
    budget. A request that two replicas did not survive, or that two failed which serve others well, is taken
    to be the cause: it harms no third. But complete answers harm none, and two replicas may go bad at once:
    after those (one silence may be among them) the budget pays for others that serve well, whose errors are
    held against them once another serves the request.
    """

    __slots__ = ("_answered", "_failed", "_is_extra", "_loads", "_moving", "_silent", "_unrecorded")

    def __init__(self) -> None:
        self._failed = self._loads = self._answered = self._silent = 0
        self._moving = False
        # The current attempt is one more than the two of other requests: the retry budget paid for it.
        self._is_extra = False
        # Of the replicas whose failures count only if another one serves the request.
        self._unrecorded: list[CircuitBreaker] = []

    def result(self, outcome: AttemptOutcome) -> AttemptResult:
        """What the end of the current attempt says of its replica at once."""
        if self._is_extra and outcome is AttemptOutcome.FAILED:
            return AttemptResult.NOTHING
        return RESULTS.get(outcome, AttemptResult.NOTHING)

    def after(
        self,
        outcome: AttemptOutcome,
        request: Request,
        at: float,
        *,
        replica: str,
        breaker: CircuitBreaker,
        serves_others: bool,
        pool: ReplicaPool[DispatchableReplica],
        health: ReplicaHealth,
        adapter_failed: bool,
    ) -> Rejection | None:
        """Why a request is rejected whose attempt on ``replica`` ended so; ``None`` if it may be retried.

        ``serves_others``: the replica had served its recent requests well.
        """
        if outcome is AttemptOutcome.REFUSED:
            if adapter_failed:
                self._loads += 1
                if self._loads >= MAX_LOADS:
                    return Rejection(RejectionCause.ADAPTER, Refusal.ADAPTER_FAILED)
            return None
        if outcome is AttemptOutcome.REJECTED:
            return Rejection(RejectionCause.REJECTED, Refusal.BAD_REQUEST)
        request.avoid.add(replica)
        self._failed += 1
        if outcome is AttemptOutcome.DENIED or (self._is_extra and outcome is AttemptOutcome.FAILED):
            self._unrecorded.append(breaker)
        if outcome in _HARMFUL:
            request.begun += 1
            self._silent += outcome is AttemptOutcome.SILENT
        elif outcome in _OWN_FAULT and serves_others:
            request.begun += 1
            self._answered += 1
        if request.begun < MAX_BEGUN:
            # A replica that was ejected since it made no progress is as good as dead.
            hung = outcome is AttemptOutcome.SILENT and breaker.state is CircuitBreakerState.OPEN
            if (hung or outcome in _PASSING) and (self._failed < MAX_ALONE or not pool.candidates()):
                self._moving = True
            else:
                self._moving = bool(_untried(request, pool.candidates(), pool))
            if self._moving:
                return None
        # Nothing but complete answers, and at most one silence, counts as begun: no replica died.
        elif request.begun == self._answered + min(self._silent, MAX_BEGUN - 1) and any(
            pool.replica(each).breaker.serves_well(at) for each in _untried(request, pool.candidates(), pool)
        ):
            self._is_extra = health.may_retry(at)
            if self._is_extra:
                return None
        if outcome is AttemptOutcome.DENIED:
            return Rejection(RejectionCause.REJECTED, Refusal.BAD_REQUEST)
        if outcome is AttemptOutcome.UNREACHABLE or (
            outcome is not AttemptOutcome.LOST and health.all_fail(at)
        ):
            return Rejection(RejectionCause.RETRIES_SPENT, Refusal.NO_REPLICA)
        return Rejection(RejectionCause.FAILED, Refusal.REPLICA_LOST)

    def may_move(self, to: CircuitBreaker, health: ReplicaHealth, at: float) -> bool:
        """Whether a request that has a slot may be sent to the replica of the breaker ``to``."""
        if not self._moving:
            return True
        self._moving = False
        if not to.in_good_standing(at):
            return health.may_retry(at)
        health.moved()
        return True

    def served(self, health: ReplicaHealth, at: float) -> None:
        """The request was served: the replicas that denied it, or failed it unrecorded, were wrong."""
        for breaker in self._unrecorded:
            health.record(breaker, AttemptResult.BAD, at)


def retryable(
    request: Request, candidates: list[Candidate], pool: ReplicaPool[DispatchableReplica], at: float
) -> list[Candidate]:
    """Those of ``candidates`` to which a request may go that others have failed.

    Replicas in good standing come first, even if it has to wait for them, then others that it has not tried.
    """
    untried = _untried(request, candidates, pool)
    if not untried:
        return candidates
    best = [each for each in untried if pool.replica(each).breaker.in_good_standing(at)] or untried
    ids = {each.id for each in best}
    return [each for each in candidates if each.id in ids]


def _untried(
    request: Request, candidates: list[Candidate], pool: ReplicaPool[DispatchableReplica]
) -> list[Candidate]:
    """The replicas that have not failed ``request`` and could take it, now or once they have room."""
    return [
        each
        for each in (*candidates, *pool.full())
        if each.id not in request.avoid and pool.serves(each, request.adapter)
    ]
