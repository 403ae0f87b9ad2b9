"""Batched dispatch: waiting requests of one adapter or prefix go to the same replica, within fair order."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Set
from itertools import islice
from typing import Final, NamedTuple

from policy.admission.equivalence_classes import EquivalenceClasses, Requirements, requirements_of
from policy.admission.fairness import QueueOrder
from policy.request import Request
from policy.routing.cost import Candidate

# How many waiting requests are searched for companions.
WINDOW: Final = 32
# How often a request may be passed by later ones at a replica that could have served it.
MOST_PASSED: Final = 8
# How much earlier than in fair order a request may go, in weighted tokens: some requests of common size.
QUANTUM: Final = 8192.0
# With how many requests that had no replica the others are compared.
MOST_KEPT: Final = 64


class FreeSlots(NamedTuple):
    """What dispatch asks of the replicas.

    ``usable`` are those of the ``candidates`` that can serve a request at all, room aside. ``choose`` is
    where it would go now, if anywhere, given all assignments so far. ``runs`` are the adapters in use on one.
    ``loss_s`` are the seconds of prefill that a request is expected to lose by not going to one now.
    ``waiting`` are all requests in the order, without those that were dispatched. ``unserved`` are those of
    some adapters that none of some candidates serves. While replicas are ``closing``, requests that end soon
    have replicas that others of a class have not.
    """

    candidates: list[Candidate]
    usable: Callable[[Request], list[Candidate]]
    choose: Callable[[Request], Candidate | None]
    runs: Callable[[Candidate], Set[str]]
    loss_s: Callable[[Request, Candidate], float]
    waiting: EquivalenceClasses
    unserved: Callable[[Set[str], list[Candidate]], set[str]]
    closing: bool = False


def has_room(candidate: Candidate) -> bool:
    """Whether the replica takes one more request within its bound, if that is known."""
    return not candidate.bound or candidate.in_flight < candidate.bound


def any_room(candidates: Iterable[Candidate]) -> bool:
    for each in candidates:  # noqa: SIM110 - for each request: faster than a generator
        if has_room(each):
            return True
    return False


def dispatch(walk: Callable[[Set[str]], Iterator[QueueOrder]], slots: FreeSlots) -> Iterator[Request]:
    """The requests that go now to their last choice; the caller takes each slot before it asks for the next.

    The first request in the fair order that any replica can take goes. If it has a session, the one among
    the next :data:`WINDOW` goes before it that loses most by not going to that replica. While the replica has
    room, companions of the first follow it: first those that share its adapter and first prefix, then those
    of an adapter in use there. Then the next in order is the first. A request is passed by others at a
    replica that could have served it at most :data:`MOST_PASSED` times, and by none whose turn is more than
    :data:`QUANTUM` later or whose priority is lower.

    A request that no replica can take now delays none that another one can. Its replicas are closed: later
    requests fare no better there, except that one whose adapter is in use waits for no loads. ``walk`` yields
    the fair order without some adapters: those whose requests have no replica left, which may become more.
    """
    window = _Window(walk, slots)
    while (first := window.next()) is not None:
        candidate = slots.choose(first.request)
        if candidate is None:
            window.close(first.request)
        elif (dearer := window.dearer(first, candidate)) is not None:
            yield dearer
        else:
            yield first.request
            yield from window.companions(first.request, candidate)


class _Window:
    """The turns that were read and not dispatched; mostly one request is enough."""

    def __init__(self, walk: Callable[[Set[str]], Iterator[QueueOrder]], slots: FreeSlots) -> None:
        self._slots = slots
        self._turns: list[QueueOrder] = []
        self._open = dict.fromkeys(slots.candidates)
        # Those that take no request for which they would load an adapter.
        self._loading: set[Candidate] = set()
        # While replicas are closing, the tokens of requests that had no replica. One with no fewer has none.
        self._too_long: dict[Requirements, list[tuple[int, int, int]]] = {}
        # These take no turn, which would put off other requests of their tenants.
        self._without = slots.unserved(slots.waiting.by_adapter.keys(), self._free())
        self._order = walk(self._without)

    def next(self) -> QueueOrder | None:
        """The next request that a replica with room could serve."""
        in_vain = 0
        while any_room(self._open):
            # Thousands may have none, in one offer after the other: asked after 1, 2, 4, ... of them.
            if in_vain and in_vain & (in_vain - 1) == 0 and self._all_closed(in_vain):
                break
            if not self._turns:
                self._grow(1)
            if not self._turns:
                break
            turn = self._turns.pop(0)
            request = turn.request
            if self._has_options(request):
                return turn
            if not request.avoid and request.only is None and not self._slots.closing:
                self._without.add(request.adapter)
            in_vain += 1
        return None

    def _all_closed(self, in_vain: int) -> bool:
        """Whether no request that waits has a replica left.

        Not checked while there are more classes than were looked at ``in_vain``: that takes as long.
        """
        waiting = self._slots.waiting
        if not self._only_loaded() and len(waiting.by_adapter) - len(self._without) > in_vain:
            return False
        samples = list(islice(waiting.samples(self._served(), shortest=self._slots.closing), in_vain + 1))
        return len(samples) <= in_vain and not any(self._has_options(each) for each in samples)

    def _served(self) -> Set[str]:
        """The adapters whose requests may have a replica left."""
        runs, free = self._slots.runs, self._free()
        adapters: Set[str] = self._slots.waiting.by_adapter.keys()
        if self._only_loaded():
            adapters = adapters & {name for each in free for name in runs(each)}
        return adapters - self._slots.unserved(adapters, free)

    def _only_loaded(self) -> bool:
        """Whether no replica with room would load an adapter."""
        return all(each in self._loading for each in self._free())

    def _free(self) -> list[Candidate]:
        return [each for each in self._open if has_room(each)]

    def close(self, missed: Request) -> None:
        """No replica took ``missed``: do not try its replicas again."""
        for each in self._options(missed):
            if missed.adapter in self._slots.runs(each):
                del self._open[each]
            else:
                self._loading.add(each)

    def dearer(self, first: QueueOrder, candidate: Candidate) -> Request | None:
        """The request that loses most by not going to ``candidate`` now, if more than ``first``, which stays.

        It must be one that the router sends there, and may pass those before it.
        """
        if not first.request.session:
            return None
        loss_s = self._slots.loss_s
        self._grow(WINDOW)
        most, dearest = loss_s(first.request, candidate), None
        for turn in self._turns:
            if turn.request.priority is not first.request.priority or turn.tag - first.tag > QUANTUM:
                break
            if (seconds := loss_s(turn.request, candidate)) > most:
                most, dearest = seconds, turn
        if dearest is None or self._slots.choose(dearest.request) is not candidate:
            return None
        if not self._may_pass(dearest, [first, *self._turns], candidate):
            return None
        self._turns.remove(dearest)
        self._turns.insert(0, first)
        return dearest.request

    def companions(self, first: Request, candidate: Candidate) -> Iterator[Request]:
        """The companions of ``first``, as long as the router sends them to ``candidate``."""
        if not has_room(candidate):
            return
        self._grow(WINDOW)
        running = self._slots.runs(candidate)
        ranked: list[tuple[int, int, QueueOrder]] = []
        for place, turn in enumerate(self._turns):
            kinship = _kinship(first, turn.request, running)
            if kinship is not None:
                ranked.append((kinship, place, turn))
        for _, _, turn in sorted(ranked):
            if self._slots.choose(turn.request) is not candidate:
                return
            if self._may_pass(turn, self._turns, candidate):
                self._turns.remove(turn)
                yield turn.request

    def _may_pass(self, turn: QueueOrder, turns: list[QueueOrder], candidate: Candidate) -> bool:
        """Whether it may go there before those that precede it in ``turns``; they then count as passed."""
        passed: list[Request] = []
        for other, tag in turns:
            if other is turn.request:
                break
            if candidate in self._slots.usable(other):
                if (
                    other.passed >= MOST_PASSED
                    or other.priority is not turn.request.priority
                    or turn.tag - tag > QUANTUM
                ):
                    return False
                passed.append(other)
        for other in passed:
            other.passed += 1
        return True

    def _options(self, request: Request) -> list[Candidate]:
        """The replicas with room that could serve it and were not closed to it."""
        return [
            each
            for each in self._slots.usable(request)
            if has_room(each)
            and each in self._open
            and (each not in self._loading or request.adapter in self._slots.runs(each))
        ]

    def _has_options(self, request: Request) -> bool:
        """Whether it has :meth:`_options`. No request gains one during a dispatch."""
        if not self._slots.closing:
            return bool(self._options(request))
        too_long = self._too_long.setdefault(requirements_of(request), [])
        tokens = (request.prompt_tokens, request.output_tokens, request.long_tokens)
        for shorter in too_long:
            if shorter[0] <= tokens[0] and shorter[1] <= tokens[1] and shorter[2] <= tokens[2]:
                return False
        if self._options(request):
            return True
        if len(too_long) < MOST_KEPT:
            too_long.append(tokens)
        return False

    def _grow(self, count: int) -> None:
        self._turns.extend(islice(self._order, min(count, WINDOW - len(self._turns))))


def _kinship(first: Request, other: Request, running: Container[str]) -> int | None:
    """0 shares adapter and prefix with ``first``, 1 the adapter, 2 one that runs there; else ``None``."""
    if other.adapter == first.adapter:
        shares = bool(first.prefix) and first.prefix[:1] == other.prefix[:1]
        return 0 if shares else 1
    return 2 if other.adapter in running else None
