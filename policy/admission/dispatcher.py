"""The dispatcher of one model: admits, orders, retries and rejects requests. Read this file first.

Both the gateway and the simulator drive it. It is pure: instants are arguments (seconds of one monotonic
clock), the replicas are a :class:`ReplicaPool`, and decisions are reported by callbacks.

It has over 400 lines: the life of a request is read as one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import islice
from typing import Final, Generic, TypeVar

from policy.admission.affinity_dispatch import FreeSlots, any_room, dispatch
from policy.admission.equivalence_classes import EquivalenceClasses, Requirements, requirements_of
from policy.admission.fairness import FairQueue, PeerTokenCounts, QueueOrder
from policy.admission.queue import AdmissionQueue, AdmittedRequest
from policy.admission.replica_pool_interface import DispatchableReplica, ReplicaPool
from policy.admission.retry_policy import AttemptOutcome, Rejection, RejectionCause, RetryState, retryable
from policy.admission.worker_slot_sharing import RANKS, rank_of
from policy.errors import Refusal
from policy.request import Request
from policy.routing.cost import Candidate, CostEstimate
from policy.routing.replica_health import AttemptResult, ReplicaHealth
from policy.routing.settings import START_SHARE
from policy.types import Priority

# Compared for each request: machine code reads a constant faster than a member of an enumeration.
_SERVED: Final = AttemptOutcome.SERVED
_BROKEN: Final = AttemptOutcome.BROKEN
_LEFT: Final = AttemptOutcome.LEFT
_NOTHING: Final = AttemptResult.NOTHING

# While a request waits and a replica is ready, the passing of time alone may change what the router predicts.
OFFER_EVERY_S: Final = 0.02
# Requests that are given slots in one offer: those of more begin in later turns of an event loop.
MOST_GRANTED: Final = 32
# Replicas that the router compares for all of these: in a large fleet one choice takes long.
MOST_COMPARED: Final = 2048
# Requests that are rejected in one call because their deadline has passed, or no replica is up.
MOST_REJECTED: Final = 128
# Priorities whose wait is bounded by the SLO; the others wait until their deadline.
_BOUND_BY_SLO: Final = frozenset({Priority.STANDARD, Priority.SHEDDABLE})

R = TypeVar("R", bound=DispatchableReplica)


class DispatchTicket(Generic[R]):
    """The life of one request from its arrival to its last attempt.

    After :meth:`enter` it has a replica, or a rejection, or waits (:attr:`queued`), and the dispatcher's
    ``resolved`` follows. After :meth:`end` it has a rejection, or may :meth:`enter` again, at its old place
    in the queue and uncharged. ``pending`` are its uncached prompt tokens at the replica until the first
    token, ``new_hashes`` the prefix hashes that are new there, ``quote`` the router's estimate,
    ``rank`` that of :func:`policy.admission.worker_slot_sharing.rank_of`, ``taken_at`` the instant of its
    slot.
    """

    __slots__ = (
        "_admitted", "_counted", "_entered", "_probe", "_retries", "_sent_at", "dispatcher",
        "expected_wait_s", "new_hashes", "pending", "quote", "rank", "rejection", "replica", "request",
        "taken_at",
    )  # fmt: skip

    def __init__(self, dispatcher: Dispatcher[R], request: Request) -> None:
        self.dispatcher = dispatcher
        self.request = request
        self.replica: R | None = None
        self.rejection: Rejection | None = None
        self.quote: CostEstimate | None = None
        self.pending = 0
        self.taken_at = 0.0
        self.new_hashes: tuple[int, ...] = ()
        self.expected_wait_s: float | None = None
        self._admitted: AdmittedRequest | None = None
        self._counted = self._entered = self._probe = False
        self._retries = RetryState()
        self._sent_at: float | None = None
        request.ticket = dispatcher.queue.ticket()
        self.rank = rank_of(request.priority, owed=False)

    @property
    def queued(self) -> bool:
        return self.request.ticket in self.dispatcher.waiting

    @property
    def shows_tokens(self) -> bool:
        """Whether its answer is seen as it is produced: it was sent, and is a stream."""
        return self._sent_at is not None

    def is_abandoned(self) -> bool:
        """Whether its client has left while it waits, so that it must not be given a slot."""
        return False

    def enter(self, at: float) -> None:
        """Take a slot, wait for one, or be rejected."""
        owner, request = self.dispatcher, self.request
        pool = owner.pool
        self.replica = self.rejection = None
        if not self._counted:
            self._counted = True
            owner.health.request(at)
        if pool.unavailable(at):
            self.rejection = Rejection(RejectionCause.UNAVAILABLE, Refusal.NO_REPLICA)
        elif request.adapter and pool.cannot_load(request.adapter):
            self.rejection = Rejection(RejectionCause.ADAPTER, Refusal.ADAPTER_FAILED)
        if self.rejection is not None:
            return
        candidates = pool.candidates()
        full = not any_room(candidates)
        fits = not full and owner.choose(self, owner.usable(request, candidates, at), at)
        if fits and not owner.waiting:
            self._entered = True
            owner.take_slot(self, at)
            self._admit(at)
        elif request.deadline <= at:
            self.rejection = owner.expired()
        else:
            self._enqueue(at, full=full, fits=fits)

    def began(self, at: float, *, streams: bool = True) -> None:
        """The request was sent to :attr:`replica`; only one that ``streams`` shows its first token."""
        self._sent_at = at if streams else None

    def first(self, at: float) -> None:
        self._prefilled(at)
        if self._sent_at is not None and self.quote is not None:
            self.dispatcher.pool.timed(self.request, self.quote, at - self._sent_at, at)

    def end(
        self, at: float, outcome: AttemptOutcome, tokens: tuple[int, int] | None = None, *,
        gap_s: float = 0.0, adapter_failed: bool = False,
    ) -> None:  # fmt: skip
        """The attempt ended.

        ``tokens`` are those of prompt and answer, if known, ``gap_s`` the mean inter-token gap of a complete
        stream; ``adapter_failed`` means that the replica could not load the adapter.
        """
        assert self.replica is not None and self.quote is not None
        health, breaker = self.dispatcher.health, self.replica.breaker
        result = self._retries.result(outcome)
        serves_others = outcome is not _SERVED and breaker.serves_well(at)
        if self._probe:
            self._probe = False
            health.probed(breaker, result, at)
        else:
            health.record(breaker, result, at)
        self._release(at, whole=outcome is _SERVED)
        pool = self.dispatcher.pool
        if tokens is not None:
            if self._admitted is not None:
                self.dispatcher.queue.settle(self._admitted, tokens[0] + tokens[1])
            pool.counted(self.request, tokens[0], tokens[1])
        if outcome is _SERVED:
            self._retries.served(health, at)
            if gap_s:
                pool.paced(self.quote, gap_s)
        elif outcome is not _BROKEN and outcome is not _LEFT:
            self.rejection = self._retries.after(
                outcome, self.request, at, replica=self.quote.candidate.id, breaker=breaker,
                serves_others=serves_others, pool=pool, health=health, adapter_failed=adapter_failed,
            )  # fmt: skip
            if self.rejection is None:
                self._uncharge()

    def excuse(self) -> None:
        """Its replicas were lost with others, which says nothing of it: it may :meth:`enter` again."""
        self.request.begun = 0
        self._retries = RetryState()

    def leave(self, at: float) -> None:
        """The client left before the request was sent: stop waiting, or give the slot back."""
        owner, request = self.dispatcher, self.request
        if self.replica is not None:
            self._give_back(at)
        elif owner.waiting.pop(request.ticket, None) is not None:
            owner.queue.remove(request, at)
            owner.classes.remove(request)
            owner.count_waiting(self, -1)
            owner.changed()

    def _admit(self, at: float) -> None:
        """It has taken a slot: charge it, and if it is a move, check whether it may be made."""
        assert self.replica is not None
        self._admitted = self.dispatcher.queue.begin(self.request, at)
        if not self._retries.may_move(self.replica.breaker, self.dispatcher.health, at):
            self._give_back(at)
            self.rejection = Rejection(RejectionCause.RETRIES_SPENT, Refusal.NO_REPLICA)

    def _enqueue(self, at: float, *, full: bool, fits: bool) -> None:
        """Wait, or be rejected on arrival; a request that a replica sent back always finds room."""
        owner, request = self.dispatcher, self.request
        pool, queue = owner.pool, owner.queue
        queue.serve(at, ready=owner.measurable)
        if self._entered:
            queue.put_back(request, at)
        else:
            patience_s, slo_s = math.inf, pool.ttft_slo_s(request.priority)
            if slo_s is not None and request.priority in _BOUND_BY_SLO:
                patience_s = START_SHARE * slo_s
                # The SLO does not cover the start of a first replica.
                if request.priority is Priority.SHEDDABLE and not pool.down:
                    request.deadline = min(request.deadline, request.arrived + slo_s)
            if queue.unmeasured:
                queue.expect(pool.service_s(request))
            verdict = queue.enter(
                request,
                pool.bounds(request, len(queue)),
                at,
                patience_s=patience_s,
                full=full,
                fits=fits,
            )
            for displaced in verdict.displaced:
                owner.reject(
                    displaced, Rejection(RejectionCause.DISPLACED, Refusal.QUEUE_FULL, verdict.retry_after_s)
                )
            if verdict.refusal is not None:
                cause = RejectionCause.LATE if verdict.refusal is Refusal.OVERLOADED else RejectionCause.FULL
                self.rejection = Rejection(cause, verdict.refusal, verdict.retry_after_s)
                return
            self._entered = True
            self.expected_wait_s = verdict.wait_s
        owner.waiting[request.ticket] = self
        owner.classes.add(request)
        self.rank = rank_of(request.priority, owed=queue.is_owed(request))
        owner.count_waiting(self, 1)
        owner.changed()

    def _prefilled(self, at: float) -> None:
        if self.pending:
            assert self.replica is not None
            self.replica.first_token(self.pending, at)
            self.pending = 0

    def _give_back(self, at: float) -> None:
        """Free a slot in which nothing was begun."""
        assert self.replica is not None
        if self._probe:
            self._probe = False
            self.replica.breaker.probed(_NOTHING, at, 0.0)
        self._release(at, whole=False)
        self._uncharge()
        self.replica = None

    def _release(self, at: float, *, whole: bool) -> None:
        assert self.replica is not None and self.quote is not None
        self._prefilled(at)
        self.replica.end()
        owner, request = self.dispatcher, self.request
        owner.running.discard(self)
        if request.adapter:
            owner.adapter_ended(request.adapter, self.quote.candidate)
        if self._admitted is not None and self._admitted.running:
            owner.queue.ended(self._admitted, at, whole=whole)
        if owner.waiting:
            owner.changed()

    def _uncharge(self) -> None:
        if self._admitted is not None:
            self.dispatcher.queue.settle(self._admitted, 0)
            self._admitted = None


class Dispatcher(Generic[R]):
    """One model's queue, the tickets that wait in it (``waiting``) and those with a slot (``running``).

    ``classes`` are the requests that wait and were given no slot yet.

    ``resolved`` is called with a ticket that waited and now has a replica or a rejection. ``changed`` is
    called when the queue changed or a slot fell free: :meth:`offer` is then due, best after all events of the
    same instant. ``weight`` is a tenant's share, ``peers`` what other workers of this host served.
    """

    def __init__(
        self,
        pool: ReplicaPool[R],
        health: ReplicaHealth,
        *,
        weight: Callable[[str], float],
        peers: PeerTokenCounts | None = None,
        resolved: Callable[[DispatchTicket[R]], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool = pool
        self.health = health
        self.queue = AdmissionQueue(lambda: FairQueue(weight, peers))
        self.waiting: dict[int, DispatchTicket[R]] = {}
        self.classes = EquivalenceClasses()
        self.running: set[DispatchTicket[R]] = set()
        self.changed = changed
        self.idle_since = 0.0
        self._resolved = resolved
        self._ranks = [0] * RANKS
        self._adapters: dict[str, Counter[str]] = {}

    def oldest_s(self, at: float) -> float:
        """The age of the oldest waiting request in seconds; 0 if none waits."""
        return max([at - request.arrived for request in self.queue.waiting.values()], default=0.0)

    @property
    def measurable(self) -> bool:
        """Whether the service rate says when a request begins.

        Replicas that are closing leave long ones waiting, and others are to come for those that give way.
        """
        return self.pool.ready and not self.pool.closing and not self.pool.gives_way

    def begun_before(self, at: float) -> list[DispatchTicket[R]]:
        """The tickets with a slot that was taken before ``at``."""
        return [each for each in self.running if each.taken_at < at]

    def drain_s(self, at: float, running: Iterable[DispatchTicket[R]]) -> float:
        """In how many seconds the last of the ``running`` requests is expected to end."""
        left = self.pool.remaining_s
        ran = [(each.request, each.quote, at - each.taken_at) for each in running]
        return max([left(request, quote, ran_s) for request, quote, ran_s in ran if quote], default=0.0)

    def due_at(self, at: float) -> float:
        """When :meth:`expire` and :meth:`offer` are due at the latest if nothing else happens."""
        deadline = self.queue.next_deadline()
        if deadline is None:
            return math.inf
        return min(deadline, at + OFFER_EVERY_S) if self.pool.ready else deadline

    def offer(self, at: float) -> bool:
        """Give free slots to waiting requests, :data:`MOST_GRANTED` at most; returns whether that was all."""
        queue, pool, waiting = self.queue, self.pool, self.waiting
        queue.serve(at, ready=self.measurable)
        candidates = list(pool.candidates()) if waiting else []
        if not any_room(candidates):
            return True
        closing = pool.closing
        serving: dict[Requirements, list[Candidate]] = {}

        def usable(request: Request) -> list[Candidate]:
            required = requirements_of(request)
            found = serving.get(required)
            if found is None:
                found = serving[required] = self._serving(request, candidates, at)
            return pool.lasting(request, found, at) if closing else found

        def choose(request: Request) -> Candidate | None:
            ticket = waiting[request.ticket]
            if not self.choose(ticket, usable(request), at):
                return None
            assert ticket.quote is not None
            return ticket.quote.candidate

        def adapters(candidate: Candidate) -> Set[str]:
            return {"", *self._adapters.get(candidate.id, ())}

        def loss_s(request: Request, candidate: Candidate) -> float:
            return pool.loss_s(request, candidate, len(usable(request)), at)

        most = max(1, min(MOST_GRANTED, MOST_COMPARED // len(candidates)))
        picked: list[int] = []
        slots = FreeSlots(candidates, usable, choose, adapters, loss_s, self.classes, pool.unserved, closing)
        for request in dispatch(self._in_order, slots):
            ticket = waiting[request.ticket]
            self.take_slot(ticket, at)
            self.classes.remove(request)
            picked.append(request.ticket)
            if len(picked) == most:
                break
            if ticket._probe:  # the replica takes no other until this one ends
                assert ticket.quote is not None
                candidates.remove(ticket.quote.candidate)
                serving.clear()
        for number in picked:
            ticket = waiting.pop(number)
            ticket._admit(at)
            self.count_waiting(ticket, -1)
            self._resolved(ticket)
        if not picked:
            self.idle_since = at
        return len(picked) < most

    def expire(self, at: float) -> bool:
        """Reject at most :data:`MOST_REJECTED` requests whose deadline has passed.

        Returns whether that was all.
        """
        expired = self.queue.expire(at, MOST_REJECTED)
        for request in expired:
            self.reject(request, self.expired())
        return len(expired) < MOST_REJECTED

    def dismiss(self, at: float) -> bool:
        """No replica is up and none is starting: reject at most :data:`MOST_REJECTED`, the oldest first.

        Returns whether that was all.
        """
        for ticket in tuple(islice(self.waiting.values(), MOST_REJECTED)):
            self.queue.remove(ticket.request, at)
            self.reject(ticket.request, Rejection(RejectionCause.UNAVAILABLE, Refusal.NO_REPLICA))
        return not self.waiting

    def give_up(self, adapters: set[str], at: float) -> bool:
        """Reject waiting requests for those of ``adapters`` that no replica can load.

        At most :data:`MOST_REJECTED` are rejected, and as many adapters looked at, which are taken out of the
        set once none waits for them. Returns whether that was all.
        """
        left = MOST_REJECTED
        while adapters and left > 0:
            adapter = adapters.pop()
            left -= 1
            if adapter not in self.classes.by_adapter or not self.pool.cannot_load(adapter):
                continue
            requests = list(islice(self.classes.of(adapter), left + 1))
            for request in requests:
                self.queue.remove(request, at)
                self.reject(request, Rejection(RejectionCause.ADAPTER, Refusal.ADAPTER_FAILED))
            left -= len(requests) - 1
            if adapter in self.classes.by_adapter:
                adapters.add(adapter)
        return not adapters

    def reject(self, request: Request, rejection: Rejection) -> None:
        """A request that was taken out of the queue is rejected."""
        ticket = self.waiting.pop(request.ticket)
        self.classes.remove(request)
        ticket.rejection = rejection
        self.count_waiting(ticket, -1)
        self._resolved(ticket)

    def expired(self) -> Rejection:
        return Rejection(
            RejectionCause.DEADLINE, Refusal.DEADLINE if self.pool.candidates() else Refusal.NO_REPLICA
        )

    def usable(self, request: Request, candidates: list[Candidate], at: float) -> list[Candidate]:
        """The candidates that it may go to, room aside."""
        found = self._serving(request, candidates, at)
        return self.pool.lasting(request, found, at) if self.pool.closing else found

    def _serving(self, request: Request, candidates: list[Candidate], at: float) -> list[Candidate]:
        """The candidates that can serve it, and did not fail it while others can."""
        if (only := request.only) is not None:
            candidates = [each for each in candidates if each.id in only]
        if request.adapter:
            candidates = [each for each in candidates if self.pool.serves(each, request.adapter)]
        if request.avoid:
            candidates = retryable(request, candidates, self.pool, at)
        return candidates

    def choose(self, ticket: DispatchTicket[R], usable: list[Candidate], at: float) -> bool:
        """Have the router choose one of the ``usable`` replicas for the ticket; returns whether it did."""
        pool, request = self.pool, ticket.request
        granted = pool.granted(usable, ticket.rank, self._ranks[ticket.rank], at)
        ticket.quote = pool.choose(request, granted, at)
        return ticket.quote is not None

    def count_waiting(self, ticket: DispatchTicket[R], change: int) -> None:
        """It waits now (1), or no longer (-1)."""
        self._ranks[ticket.rank] += change
        self.pool.queued(change, ticket.rank)

    def take_slot(self, ticket: DispatchTicket[R], at: float) -> None:
        """Take a slot of the chosen replica, at once: the next choice depends on it."""
        quote, request = ticket.quote, ticket.request
        assert quote is not None
        replica = ticket.replica = self.pool.replica(quote.candidate)
        ticket.taken_at = at
        self.running.add(ticket)
        ticket.pending = quote.uncached
        ticket.new_hashes = self.pool.sent(request, quote, at)
        ticket._probe = replica.begin(quote.uncached)
        if request.adapter:
            self._adapters.setdefault(quote.candidate.id, Counter())[request.adapter] += 1

    def adapter_ended(self, adapter: str, candidate: Candidate) -> None:
        """A request for ``adapter`` no longer runs there."""
        running = self._adapters[candidate.id]
        running[adapter] -= 1
        if not running[adapter]:
            del running[adapter]
        if not running:
            del self._adapters[candidate.id]

    def _in_order(self, without: Set[str]) -> Iterator[QueueOrder]:
        for turn in self.queue.walk(without):
            if not self.waiting[turn.request.ticket].is_abandoned():
                yield turn
