"""Batched dispatch: waiting requests of one adapter or prefix go to the same replica, within fair order."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import islice
from typing import NamedTuple

from policy.admission.queue import Waiting
from policy.request import Request
from policy.routing.cost import Candidate, CostEstimate

# How many waiting requests are searched for companions.
WINDOW = 32
# How many requests may find no replica before the rest is left for later: each choice costs time.
MOST_MISSES = 4
# How often a request may be passed by later ones at a replica that could have served it.
MOST_PASSED = 8
# How much earlier than in fair order a request may go, in weighted tokens: some requests of common size.
QUANTUM = 8192.0


class Assignment(NamedTuple):
    """``request`` goes to ``quote.candidate``, before those in ``passed``, which it could have served too."""

    request: Request
    quote: CostEstimate
    passed: tuple[Request, ...]


class FreeSlots(NamedTuple):
    """What dispatch asks of the replicas.

    ``quote`` is where a request would go now, if anywhere, given all assignments so far. ``could`` is whether
    a replica can serve a request at all, room aside. ``runs`` are the adapters in use on one.
    """

    quote: Callable[[Request], CostEstimate | None]
    could: Callable[[Request, Candidate], bool]
    runs: Callable[[Candidate], Container[str]]


def dispatch(order: Iterator[Waiting], room: FreeSlots) -> Iterator[Assignment]:
    """Assignments in the fair ``order``; the caller takes each slot before it asks for the next assignment.

    The first request that any replica can take goes. While that replica has room, companions among the next
    :data:`WINDOW` requests follow it: first those that share its adapter and first prefix, then those of an
    adapter in use there. Then the next in order is the first. A request is passed by others at a replica that
    could have served it at most :data:`MOST_PASSED` times, and by none whose turn is more than
    :data:`QUANTUM` later or whose priority is lower.
    """
    window = _Window(order, room)
    misses = 0
    while misses < MOST_MISSES and (first := window.next()) is not None:
        quote = room.quote(first.request)
        pick = None if quote is None else window.pick(first, quote)
        if pick is None:
            misses += 1
        else:
            yield pick
            yield from window.companions(first, pick.quote.candidate)


class _Waiter:
    """One of the window, ``gone`` once assigned."""

    __slots__ = ("gone", "passed", "request", "tag")

    def __init__(self, turn: Waiting) -> None:
        self.request, self.tag, self.passed = turn
        self.gone = False


class _Window:
    """The part of the order that was read so far; mostly one request is enough."""

    def __init__(self, order: Iterator[Waiting], room: FreeSlots) -> None:
        self._order = order
        self._room = room
        self._waiters: list[_Waiter] = []
        self._tried = 0

    def next(self) -> _Waiter | None:
        """The next in order that was neither assigned nor tried."""
        while self._tried < WINDOW:
            if self._tried == len(self._waiters):
                self._grow(1)
            if self._tried == len(self._waiters):
                break
            waiter = self._waiters[self._tried]
            self._tried += 1
            if not waiter.gone:
                return waiter
        return None

    def pick(self, waiter: _Waiter, quote: CostEstimate) -> Assignment | None:
        """The assignment of ``waiter``, unless it would pass a request that must not be passed."""
        passed = []
        for other in self._waiters:
            if other is waiter:
                break
            if not other.gone and self._room.could(other.request, quote.candidate):
                if (
                    other.passed >= MOST_PASSED
                    or other.request.priority is not waiter.request.priority
                    or waiter.tag - other.tag > QUANTUM
                ):
                    return None
                passed.append(other)
        for other in passed:
            other.passed += 1
        waiter.gone = True
        return Assignment(waiter.request, quote, tuple(other.request for other in passed))

    def companions(self, first: _Waiter, candidate: Candidate) -> Iterator[Assignment]:
        """The companions of ``first``, as long as the router sends them to ``candidate``."""
        if candidate.bound and candidate.in_flight >= candidate.bound:
            return
        self._grow(WINDOW)
        running = self._room.runs(candidate)
        ranked: list[tuple[int, int]] = []
        for place in range(self._tried, len(self._waiters)):
            waiter = self._waiters[place]
            kinship = None if waiter.gone else _kinship(first.request, waiter.request, running)
            if kinship is not None:
                ranked.append((kinship, place))
        for _, place in sorted(ranked):
            waiter = self._waiters[place]
            quote = self._room.quote(waiter.request)
            if quote is None or quote.candidate is not candidate:
                return
            pick = self.pick(waiter, quote)
            if pick is not None:
                yield pick

    def _grow(self, count: int) -> None:
        count = min(count, WINDOW - len(self._waiters))
        self._waiters.extend(_Waiter(turn) for turn in islice(self._order, count))


def _kinship(first: Request, other: Request, running: Container[str]) -> int | None:
    """0 shares adapter and prefix with ``first``, 1 the adapter, 2 one that runs there; else ``None``."""
    if other.adapter == first.adapter:
        shares = bool(first.prefix) and first.prefix[:1] == other.prefix[:1]
        return 0 if shares else 1
    return 2 if other.adapter in running else None
