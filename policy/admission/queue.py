"""The queue of one model in one worker: who waits, who is sent away, and who is next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from policy.admission.discipline import Discipline
from policy.admission.drain_rate import RANK, ServiceRate
from policy.admission.fairness import cost
from policy.admission.ordered_set import OrderedSet
from policy.admission.wait_margin import LEAST, WaitMargin
from policy.errors import Refusal
from policy.request import Request
from policy.types import Priority

MAX_RETRY_AFTER_S = 120
# A newcomer may displace so many: more small ones than that are not worth one large.
MOST_DISPLACED = 16
# A tenant's last fifty who came to a full house say how many are turned away. Where that is nearly all, the
# others wait half as long as they might: no slot runs empty for it, and by longer waits no more are served.
CROWD_GAIN = 0.02
CROWDED = 0.5
MOST_CROWDS = 1024


class Bounds(NamedTuple):
    """How many requests and how many of their bytes may wait."""

    requests: int
    size: int


class Verdict(NamedTuple):
    """What becomes of a newcomer: it waits, unless ``refusal`` says why not.

    ``wait_s`` is how long it is expected to wait, ``None`` while nobody knows. ``retry_after_s`` is when
    it may fit, 1..120; the same holds for those ``displaced`` by it, who wait no more.
    """

    refusal: Refusal | None
    wait_s: float | None
    retry_after_s: int
    displaced: tuple[Request, ...] = ()


class Waiting(NamedTuple):
    """A request that waits, at its turn: ``tag`` as in :class:`policy.admission.discipline.QueueOrder`,
    within its
    class.

    ``passed`` counts those that came after it and were served by a replica that could have had it.
    """

    request: Request
    tag: float
    passed: int


class Admitted:
    """A request that began, until it :meth:`Queue.ended`."""

    __slots__ = ("charge", "request", "running")

    def __init__(self, request: Request, charge: Any) -> None:
        self.request = request
        self.charge = charge
        self.running = True


class Queue:
    """Requests by priority class, strictly; within a class by its discipline; within a flow by ticket.

    Instants are seconds of one monotonic clock. ``waiting`` are those that wait, by ticket, ``size`` their
    bytes. ``ready`` is whether any replica is up: while none is, what waits says nothing of how fast it
    would be served.
    All operations are O(log n), amortised.
    """

    def __init__(self, discipline: Callable[[], Discipline[Any]]) -> None:
        self._classes: dict[Priority, Discipline[Any]] = {priority: discipline() for priority in Priority}
        self.waiting: dict[int, Request] = {}
        self._deadlines: OrderedSet[Request] = OrderedSet()
        self._passed: dict[int, int] = {}
        self._drain = ServiceRate()
        self._foresight = WaitMargin()
        self._foreseen: dict[int, tuple[float, float]] = {}
        self._crowds: dict[str, float] = {}
        self._tickets = 0
        self.size = 0
        self.ready = False

    def __len__(self) -> int:
        return len(self.waiting)

    def __contains__(self, request: Request) -> bool:
        return request.ticket in self.waiting

    def depth(self, priority: Priority) -> int:
        """How many of a class wait."""
        return len(self._classes[priority])

    def ticket(self) -> int:
        """The next place in the order of arrival."""
        self._tickets += 1
        return self._tickets

    def enter(
        self,
        newcomer: Request,
        bounds: Bounds,
        at: float,
        *,
        patience_s: float = math.inf,
        full: bool = False,
        kept: bool = False,
    ) -> Verdict:
        """A request that was never in the queue waits, or is refused at once.

        It is refused as ``overloaded`` when it could not be served before its deadline, or would wait
        longer than ``patience_s``, or half of that where most are turned away: until a slot falls free,
        where all are ``full``, or by the rate. The rate is not held against one before whom nobody
        stands: somebody must be tried, or a rate that was bad once would never be measured again.
        Nothing is against one for whom a slot was ``kept``. Beyond ``bounds`` they are
        refused as ``queue_full``, unless somebody of a less important class, or of the same class and a
        tenant with a longer backlog, makes room. A request that is larger than all bytes may be waits
        alone.
        """
        wait_s, late_s = None, 0.0
        if self.ready and not kept:
            crowd = self._crowds.get(newcomer.tenant, 0.0)
            wait_s, late_s = self._foresee(newcomer, at, patience_s * (1.0 - CROWDED * crowd), full=full)
            if len(self._crowds) >= MOST_CROWDS:
                self._crowds.clear()
            self._crowds[newcomer.tenant] = crowd + CROWD_GAIN * ((1.0 if late_s > 0.0 else 0.0) - crowd)
            if late_s > 0.0:
                return Verdict(Refusal.OVERLOADED, wait_s, retry_after(late_s))
        displaced: list[Request] = []
        while not self._fits(newcomer, bounds):
            worse = self._spare(newcomer) if len(displaced) < MOST_DISPLACED else None
            if worse is None:
                for request in displaced:
                    self._put(request, at, returned=False)
                return Verdict(Refusal.QUEUE_FULL, wait_s, self._retry_full(newcomer))
            self.remove(worse, at)
            displaced.append(worse)
        self._put(newcomer, at, returned=False)
        if wait_s is not None:
            self._foreseen[newcomer.ticket] = (at, wait_s)
        return Verdict(None, wait_s, self._retry_full(newcomer), tuple(displaced))

    def put_back(self, request: Request, at: float) -> None:
        """A replica did not take it: it stands in its old place, however full the queue has become."""
        self._put(request, at, returned=True)

    def remove(self, request: Request, at: float) -> bool:
        """It waits no more; whether it did."""
        if self.waiting.pop(request.ticket, None) is None:
            return False
        self._classes[request.priority].remove(request)
        self._deadlines.drop(request)
        self._passed.pop(request.ticket, None)
        self._foreseen.pop(request.ticket, None)
        self.size -= request.size
        self._drain.busy(at, waits=self.ready and bool(self.waiting))
        return True

    def begin(self, request: Request, at: float) -> Admitted:
        """It goes to a replica now, having waited or not, and is charged what it is expected to cost."""
        waited = request.ticket in self.waiting
        if waited:
            self._learn(request, at)
            self.remove(request, at)
        tokens = cost(request)
        self._drain.began(request.ticket, tokens, request.priority, at, waited=waited)
        return Admitted(request, self._classes[request.priority].charge(request))

    def settle(self, began: Admitted, tokens: int) -> None:
        """It cost ``tokens`` in truth; 0 takes back what was charged."""
        self._classes[began.request.priority].settle(began.charge, tokens)

    def ended(self, began: Admitted, at: float, *, whole: bool) -> None:
        """It runs no more; ``whole`` if it was served to its end. Said again it does nothing."""
        if began.running:
            began.running = False
            self._drain.ended(began.request.ticket, at, whole=whole)
            self._classes[began.request.priority].ended(began.charge)

    def walk(self) -> Iterator[Waiting]:
        """All that wait, in their order; nothing may change meanwhile."""
        passed = self._passed
        for queue in self._classes.values():
            if len(queue):
                for request, tag in queue.walk():
                    yield Waiting(request, tag, passed.get(request.ticket, 0))

    def pass_by(self, request: Request) -> None:
        """Another went before ``request`` to a replica that could have had it."""
        self._passed[request.ticket] = self._passed.get(request.ticket, 0) + 1

    @property
    def unsure(self) -> bool:
        """Whether nobody has ended yet, so that nobody knows how long one stays."""
        return self._drain.unsure

    def expect(self, stays_s: float) -> None:
        """One that begins is expected to end after so many seconds, while that is :attr:`unsure`."""
        self._drain.expect(stays_s)

    def expire(self, at: float) -> list[Request]:
        """Remove and return all whose deadline is not after ``at``, earliest first."""
        expired: list[Request] = []
        while (first := self._deadlines.least()) is not None and first[1] <= at:
            self._learn(first[0], at)
            self.remove(first[0], at)
            expired.append(first[0])
        return expired

    def next_deadline(self) -> float | None:
        """The earliest deadline of those that wait."""
        first = self._deadlines.least()
        return None if first is None else first[1]

    def hear_peers(self) -> None:
        """Count what other workers served; to be called now and then while somebody waits."""
        for queue in self._classes.values():
            if len(queue):
                queue.hear()

    def serve(self, at: float, *, ready: bool) -> None:
        """Whether a replica is up from ``at`` on."""
        if ready is not self.ready:
            self.ready = ready
            self._drain.busy(at, waits=ready and bool(self.waiting))

    def _foresee(
        self, newcomer: Request, at: float, patience_s: float, *, full: bool
    ) -> tuple[float | None, float]:
        """How long it would wait, ``None`` while nobody knows, and by how much that may be too long."""
        rate = self._drain.rate(newcomer.priority)
        if rate is None:
            return None, 0.0
        ahead = self._ahead(newcomer)
        free_s = self._drain.free_s(ahead, at) if full else 0.0
        # The next place is free after half of the time between two, on average.
        wait_s = max(free_s, (ahead + cost(newcomer) / 2) / rate)
        left_s = newcomer.deadline - at
        if not ahead:  # were the slack held against the first, nobody might wait, and show that it is smaller
            return wait_s, (1.0 + LEAST) * free_s - min(patience_s, left_s)
        # A promise is of the usual, but a deadline of the worst.
        return wait_s, max(wait_s - patience_s, wait_s + self._foresight.slack_s(wait_s) - left_s)

    def _ahead(self, newcomer: Request) -> float:
        """Tokens that would be served before it."""
        better = sum(self._classes[priority].tokens for priority in Priority if _before(priority, newcomer))
        return better + self._classes[newcomer.priority].ahead(newcomer)

    def _learn(self, request: Request, at: float) -> None:
        """Its wait ends: was it foreseen?"""
        if (foreseen := self._foreseen.get(request.ticket)) is not None:
            self._foresight.learn(foreseen[1], at - foreseen[0])

    def _put(self, request: Request, at: float, *, returned: bool) -> None:
        if request.ticket in self.waiting:
            raise ValueError(f"ticket {request.ticket} already waits")
        self.waiting[request.ticket] = request
        self._classes[request.priority].add(request, returned=returned)
        self._deadlines.put(request, request.deadline)
        self.size += request.size
        self._drain.busy(at, waits=self.ready)

    def _fits(self, request: Request, bounds: Bounds) -> bool:
        if not self.waiting:
            return True
        return len(self.waiting) < bounds.requests and self.size + request.size <= bounds.size

    def _spare(self, newcomer: Request) -> Request | None:
        """Who of the least important class has to make room."""
        for priority in reversed(Priority):
            if _before(priority, newcomer):
                break
            same = priority is newcomer.priority
            if (found := self._classes[priority].spare(newcomer if same else None)) is not None:
                return found
        return None

    def _retry_full(self, newcomer: Request) -> int:
        """A full queue has room again once it has served one more of the size."""
        rate = self._drain.rate(newcomer.priority)
        return retry_after(cost(newcomer) / rate if rate else 1.0)


def _before(priority: Priority, newcomer: Request) -> bool:
    return RANK[priority] < RANK[newcomer.priority]


def retry_after(seconds: float) -> int:
    """``seconds`` as Retry-After says them: whole, 1..120."""
    return math.ceil(max(1.0, min(float(MAX_RETRY_AFTER_S), seconds)))
