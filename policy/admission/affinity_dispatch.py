"""Batched dispatch: waiting requests of one adapter or prefix go to the same replica, within fair order."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import islice
from typing import NamedTuple

from policy.admission.fairness import QueueOrder
from policy.request import Request
from policy.routing.cost import Candidate

# How many waiting requests are searched for companions.
WINDOW = 32
# How many requests may find no replica before the rest is left for later: each choice costs time.
MOST_MISSES = 4
# How often a request may be passed by later ones at a replica that could have served it.
MOST_PASSED = 8
# How much earlier than in fair order a request may go, in weighted tokens: some requests of common size.
QUANTUM = 8192.0


class FreeSlots(NamedTuple):
    """What dispatch asks of the replicas.

    ``choose`` is where a request would go now, if anywhere, given all assignments so far. ``could`` is
    whether a replica can serve a request at all, room aside. ``runs`` are the adapters in use on one.
    """

    choose: Callable[[Request], Candidate | None]
    could: Callable[[Request, Candidate], bool]
    runs: Callable[[Candidate], Container[str]]


def dispatch(order: Iterator[QueueOrder], room: FreeSlots) -> Iterator[Request]:
    """The requests that go now to their last choice; the caller takes each slot before it asks for the next.

    The first request in the fair ``order`` that any replica can take goes. While that replica has room,
    companions among the next :data:`WINDOW` requests follow it: first those that share its adapter and first
    prefix, then those of an adapter in use there. Then the next in order is the first. A request is passed by
    others at a replica that could have served it at most :data:`MOST_PASSED` times, and by none whose turn is
    more than :data:`QUANTUM` later or whose priority is lower.
    """
    window = _Window(order, room)
    misses = 0
    while misses < MOST_MISSES and (first := window.next()) is not None:
        request = window.turns[first].request
        candidate = room.choose(request)
        if candidate is None or not window.take(first, candidate):
            misses += 1
        else:
            yield request
            yield from window.companions(request, candidate)


class _Window:
    """The ``turns`` that were read so far, by their place in the order; mostly one request is enough."""

    def __init__(self, order: Iterator[QueueOrder], room: FreeSlots) -> None:
        self._order = order
        self._room = room
        self.turns: list[QueueOrder] = []
        self._taken: set[int] = set()
        self._tried = 0

    def next(self) -> int | None:
        """The next place that was neither taken nor tried."""
        while self._tried < WINDOW:
            if self._tried == len(self.turns):
                self._grow(1)
            if self._tried == len(self.turns):
                break
            place = self._tried
            self._tried += 1
            if place not in self._taken:
                return place
        return None

    def take(self, place: int, candidate: Candidate) -> bool:
        """Let the request there go to ``candidate``, unless it would pass one that must not be passed."""
        request, tag = self.turns[place]
        passed: list[Request] = []
        for i in range(place):
            other, earlier_tag = self.turns[i]
            if i not in self._taken and self._room.could(other, candidate):
                if (
                    other.passed >= MOST_PASSED
                    or other.priority is not request.priority
                    or tag - earlier_tag > QUANTUM
                ):
                    return False
                passed.append(other)
        for other in passed:
            other.passed += 1
        self._taken.add(place)
        return True

    def companions(self, first: Request, candidate: Candidate) -> Iterator[Request]:
        """The companions of ``first``, as long as the router sends them to ``candidate``."""
        if candidate.bound and candidate.in_flight >= candidate.bound:
            return
        self._grow(WINDOW)
        running = self._room.runs(candidate)
        ranked: list[tuple[int, int]] = []
        for place in range(self._tried, len(self.turns)):
            if place not in self._taken:
                kinship = _kinship(first, self.turns[place].request, running)
                if kinship is not None:
                    ranked.append((kinship, place))
        for _, place in sorted(ranked):
            request = self.turns[place].request
            if self._room.choose(request) is not candidate:
                return
            if self.take(place, candidate):
                yield request

    def _grow(self, count: int) -> None:
        self.turns.extend(islice(self._order, min(count, WINDOW - len(self.turns))))


def _kinship(first: Request, other: Request, running: Container[str]) -> int | None:
    """0 shares adapter and prefix with ``first``, 1 the adapter, 2 one that runs there; else ``None``."""
    if other.adapter == first.adapter:
        shares = bool(first.prefix) and first.prefix[:1] == other.prefix[:1]
        return 0 if shares else 1
    return 2 if other.adapter in running else None
