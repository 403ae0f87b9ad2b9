"""The queue of one model in one worker: order, bounds, predicted waits and rejections on arrival."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from typing import Any, Final, NamedTuple

from policy.admission.fairness import QueueDiscipline, QueueOrder, cost
from policy.admission.indexed_heap import IndexedHeap
from policy.admission.wait_prediction import LEAST, RANK, ServiceRate, WaitMargin
from policy.errors import Refusal
from policy.request import Request
from policy.types import Priority

MAX_RETRY_AFTER_S: Final = 120
# How many waiting requests one newcomer may displace: more small ones are not worth one large.
MOST_DISPLACED: Final = 16
# The rejected fraction of a tenant's requests is a mean over about the last fifty. Where it is nearly 1, the
# others wait half as long as they might: slots stay busy, and longer waits would serve no more requests.
CROWD_GAIN: Final = 0.02
CROWDED: Final = 0.5
MOST_CROWDS: Final = 1024


class QueueLimits(NamedTuple):
    """The most requests and bytes that may wait."""

    requests: int
    size: int


class EnqueueResult(NamedTuple):
    """Whether a newcomer waits; if not, ``refusal`` says why.

    ``wait_s`` is the expected wait, ``None`` while it is unknown. ``retry_after_s`` is when it may fit, 1 to
    120 seconds; the same holds for the ``displaced``, which no longer wait.
    """

    refusal: Refusal | None
    wait_s: float | None
    retry_after_s: int
    displaced: tuple[Request, ...] = ()


class AdmittedRequest:
    """A request that was sent to a replica, until :meth:`AdmissionQueue.ended`."""

    __slots__ = ("charge", "request", "running")

    def __init__(self, request: Request, charge: Any) -> None:
        self.request = request
        self.charge = charge
        self.running = True


class AdmissionQueue:
    """Requests in strict order of priority; within a priority by its discipline; within a flow by ticket.

    Instants are seconds of one monotonic clock. ``waiting`` are the requests by ticket, ``size`` their bytes.
    ``ready`` is whether a replica takes every request: otherwise the service rate is not measured. All
    operations are O(log n), amortised.
    """

    def __init__(self, discipline: Callable[[], QueueDiscipline[Any]]) -> None:
        self._classes: dict[Priority, QueueDiscipline[Any]] = {
            priority: discipline() for priority in Priority
        }
        self.waiting: dict[int, Request] = {}
        self._deadlines: IndexedHeap[Request] = IndexedHeap()
        self._drain = ServiceRate()
        self._margin = WaitMargin()
        self._predicted: dict[int, tuple[float, float]] = {}
        self._crowds: dict[str, float] = {}
        self._tickets = 0
        self.size = 0
        self.ready = False

    def __len__(self) -> int:
        return len(self.waiting)

    def depth(self, priority: Priority) -> int:
        return len(self._classes[priority])

    def ticket(self) -> int:
        """The next place in the order of arrival."""
        self._tickets += 1
        return self._tickets

    def enter(
        self,
        newcomer: Request,
        bounds: QueueLimits,
        at: float,
        *,
        patience_s: float = math.inf,
        full: bool = False,
        fits: bool = False,
    ) -> EnqueueResult:
        """Queue a request that was never in the queue, or reject it at once.

        It is rejected as ``overloaded`` if it is predicted to miss its deadline or to wait longer than
        ``patience_s`` (half of that where most requests are rejected). The wait is predicted from when a slot
        falls free, where all replicas are ``full``, and from the service rate. The rate does not count
        against the first in the queue: one must be tried, or a bad rate would never be measured again. A
        request that ``fits`` a free slot, as those before it do not, is not rejected so. Beyond ``bounds`` it
        is rejected as ``queue_full``, unless a request of a lower priority, or of the same priority and a
        tenant with a longer backlog, makes room. A request that is larger than the limit in bytes may wait
        alone.
        """
        wait_s, late_s = None, 0.0
        if self.ready and not fits:
            crowd = self._crowds.get(newcomer.tenant, 0.0)
            wait_s, late_s = self._predict(newcomer, at, patience_s * (1.0 - CROWDED * crowd), full=full)
            if len(self._crowds) >= MOST_CROWDS:
                self._crowds.clear()
            self._crowds[newcomer.tenant] = crowd + CROWD_GAIN * ((1.0 if late_s > 0.0 else 0.0) - crowd)
            if late_s > 0.0:
                return EnqueueResult(Refusal.OVERLOADED, wait_s, retry_after(late_s))
        displaced: list[Request] = []
        while not self._fits(newcomer, bounds):
            worse = self._victim(newcomer) if len(displaced) < MOST_DISPLACED else None
            if worse is None:
                for request in displaced:
                    self._put(request, at, returned=False)
                return EnqueueResult(Refusal.QUEUE_FULL, wait_s, self._retry_full(newcomer))
            self.remove(worse, at)
            displaced.append(worse)
        self._put(newcomer, at, returned=False)
        if wait_s is not None:
            self._predicted[newcomer.ticket] = (at, wait_s)
        return EnqueueResult(None, wait_s, self._retry_full(newcomer), tuple(displaced))

    def put_back(self, request: Request, at: float) -> None:
        """A replica did not take it: it returns to its old place, however full the queue has become."""
        self._put(request, at, returned=True)

    def remove(self, request: Request, at: float) -> bool:
        """Take it out of the queue; returns whether it waited."""
        if self.waiting.pop(request.ticket, None) is None:
            return False
        self._classes[request.priority].remove(request)
        self._deadlines.drop(request)
        self._predicted.pop(request.ticket, None)
        self.size -= request.size
        self._drain.busy(at, waits=self.ready and bool(self.waiting))
        return True

    def begin(self, request: Request, at: float) -> AdmittedRequest:
        """It goes to a replica now, having waited or not, and is charged its expected cost."""
        waited = request.ticket in self.waiting
        if waited:
            self._learn(request, at)
            self.remove(request, at)
        tokens = cost(request)
        self._drain.began(request.ticket, tokens, request.priority, at, waited=waited)
        return AdmittedRequest(request, self._classes[request.priority].charge(request))

    def settle(self, began: AdmittedRequest, tokens: int) -> None:
        """Correct its charge to ``tokens``; 0 takes it back."""
        self._classes[began.request.priority].settle(began.charge, tokens)

    def ended(self, began: AdmittedRequest, at: float, *, whole: bool) -> None:
        """It no longer runs; ``whole`` if it was served to its end. A second call does nothing."""
        if began.running:
            began.running = False
            self._drain.ended(began.request.ticket, at, whole=whole)
            self._classes[began.request.priority].ended(began.charge)

    def walk(self, without: Set[str] = frozenset()) -> Iterator[QueueOrder]:
        """All waiting requests in order, as :meth:`policy.admission.fairness.QueueDiscipline.walk`."""
        for queue in self._classes.values():
            if len(queue):
                yield from queue.walk(without)

    def is_owed(self, request: Request) -> bool:
        """Whether a request, which was queued last, goes before those of its priority in other workers."""
        return self._classes[request.priority].is_owed(request)

    @property
    def unmeasured(self) -> bool:
        """Whether no request has ended yet, so that service times are unknown."""
        return self._drain.unmeasured

    def expect(self, stays_s: float) -> None:
        """Assume a service time in seconds, while :attr:`unmeasured`; 0 if none can be assumed."""
        self._drain.expect(stays_s)

    def expire(self, at: float, most: float = math.inf) -> list[Request]:
        """Remove and return at most ``most`` requests whose deadline has passed, earliest first."""
        expired: list[Request] = []
        while len(expired) < most and (first := self._deadlines.least()) is not None and first[1] <= at:
            self._learn(first[0], at)
            self.remove(first[0], at)
            expired.append(first[0])
        return expired

    def next_deadline(self) -> float | None:
        first = self._deadlines.least()
        return None if first is None else first[1]

    def count_peers(self) -> None:
        """Count what other workers served; to be called regularly while requests wait."""
        for queue in self._classes.values():
            if len(queue):
                queue.count_peers()

    def serve(self, at: float, *, ready: bool) -> None:
        """Whether a replica takes every request from ``at`` on."""
        if ready is not self.ready:
            self.ready = ready
            self._drain.busy(at, waits=ready and bool(self.waiting))

    def _predict(
        self, newcomer: Request, at: float, patience_s: float, *, full: bool
    ) -> tuple[float | None, float]:
        """The predicted wait, ``None`` while unknown, and by how many seconds it may be too long."""
        rate = self._drain.rate(newcomer.priority)
        if rate is None:
            return None, 0.0
        ahead = self._ahead(newcomer)
        free_s = self._drain.free_s(ahead, at) if full else 0.0
        # On average, half of the time between two free slots passes until the next one.
        wait_s = max(free_s, (ahead + cost(newcomer) / 2) / rate)
        left_s = newcomer.deadline - at
        if not ahead:  # with the margin no request might wait, and show that it is too large
            return wait_s, (1.0 + LEAST) * free_s - min(patience_s, left_s)
        # The SLO is of the usual wait, the deadline of the worst.
        return wait_s, max(wait_s - patience_s, wait_s + self._margin.slack_s(wait_s) - left_s)

    def _ahead(self, newcomer: Request) -> float:
        """Tokens that would be served before it."""
        better = sum(self._classes[priority].tokens for priority in Priority if _before(priority, newcomer))
        return better + self._classes[newcomer.priority].ahead(newcomer)

    def _learn(self, request: Request, at: float) -> None:
        if (predicted := self._predicted.get(request.ticket)) is not None:
            self._margin.learn(predicted[1], at - predicted[0])

    def _put(self, request: Request, at: float, *, returned: bool) -> None:
        if request.ticket in self.waiting:
            raise ValueError(f"ticket {request.ticket} already waits")
        request.passed = 0
        self.waiting[request.ticket] = request
        self._classes[request.priority].add(request, returned=returned)
        self._deadlines.put(request, request.deadline)
        self.size += request.size
        self._drain.busy(at, waits=self.ready)

    def _fits(self, request: Request, bounds: QueueLimits) -> bool:
        if not self.waiting:
            return True
        return len(self.waiting) < bounds.requests and self.size + request.size <= bounds.size

    def _victim(self, newcomer: Request) -> Request | None:
        """The request of the lowest priority that has to make room, if any."""
        for priority in reversed(Priority):
            if _before(priority, newcomer):
                break
            same = priority is newcomer.priority
            if (found := self._classes[priority].victim(newcomer if same else None)) is not None:
                return found
        return None

    def _retry_full(self, newcomer: Request) -> int:
        """Seconds until a full queue has served as much as the newcomer needs."""
        rate = self._drain.rate(newcomer.priority)
        return retry_after(cost(newcomer) / rate if rate else 1.0)


def _before(priority: Priority, newcomer: Request) -> bool:
    return RANK[priority] < RANK[newcomer.priority]


def retry_after(seconds: float) -> int:
    """``seconds`` as a Retry-After value: whole, 1 to 120."""
    return math.ceil(max(1.0, min(float(MAX_RETRY_AFTER_S), seconds)))
