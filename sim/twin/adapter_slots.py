"""The slots of a simulated replica: which adapters are loaded, who waits for which, and what goes.

As :mod:`serve.engine.adapters.slots` has it: a request waits until its adapter is loaded, others pass it, and
what requests use is never unloaded. What goes of the rest, and what is loaded ahead of requests, a rule says.

A guard's rule of its slots in virtual time, and the counts of requests that it and a plan go by."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

# After so long without a slot whoever waits comes before newcomers of one adapter that has one, as
# PATIENCE_S of serve/engine/adapters/slots.py.
PATIENCE_S = 2.0


class EvictionRule(Protocol):
    """What a replica does with its slots; instants are seconds.

    ``shares`` is whether one load lets in all that wait for the adapter; else they look one after the other.
    """

    shares: bool

    def asked(self, adapter: str, at: float) -> None:
        """A request came for ``adapter``."""
        ...

    def victim(self, idle: Sequence[str], at: float) -> str:
        """Which of ``idle`` goes: those that no request uses, the least recently used first."""
        ...

    def ahead(self, loaded: Collection[str], idle: Sequence[str], free: bool, at: float) -> str | None:
        """What to load though nobody waits for it: into a ``free`` slot, or for one of ``idle``."""
        ...


class LeastRecentlyUsed:
    """What was used longest ago goes, and nothing is loaded ahead."""

    def __init__(self, *, shares: bool = True) -> None:
        self.shares = shares

    def asked(self, adapter: str, at: float) -> None:
        """The order of use is the slots' own."""

    def victim(self, idle: Sequence[str], at: float) -> str:
        return idle[0]

    def ahead(self, loaded: Collection[str], idle: Sequence[str], free: bool, at: float) -> str | None:
        return None


class _Waiter(NamedTuple):
    """A request that waits since ``at``; ``turn`` is its place in the order of all."""

    request: str
    at: float
    turn: int


class Slots:
    """The books of ``capacity`` slots; requests are ids, instants are seconds. ``loads`` counts loads.

    ``loading`` is the adapter whose load is under way, ``changes`` counts how often what is loaded changed.
    """

    def __init__(self, capacity: int, rule: EvictionRule) -> None:
        self.capacity = capacity
        self.loads = self.changes = 0
        self.loading: str | None = None
        self._rule = rule
        # Those with a slot with how many requests use each, by last use; then who waits for which.
        self._users: OrderedDict[str, int] = OrderedDict()
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self._deferred = self._turns = 0

    @property
    def loaded(self) -> tuple[str, ...]:
        """The adapters that are loaded, the least recently used first."""
        return tuple(adapter for adapter in self._users if adapter != self.loading)

    @property
    def awaited(self) -> tuple[str, ...]:
        """The adapters that requests wait for."""
        return tuple(self._waiting)

    @property
    def deferred(self) -> int:
        """Requests that wait."""
        return self._deferred

    def take(self, request: str, adapter: str, at: float) -> bool:
        """Whether ``request`` may use ``adapter`` at once; else it waits."""
        self._rule.asked(adapter, at)
        here = adapter in self._users and adapter != self.loading
        newcomers_wait = self._rule.shares and adapter in self._waiting
        if here and not newcomers_wait and self._yielding(at) != adapter:
            self._users[adapter] += 1
            self._users.move_to_end(adapter)
            return True
        self._turns += 1
        self._waiting.setdefault(adapter, deque()).append(_Waiter(request, at, self._turns))
        self._deferred += 1
        return False

    def leave(self, adapter: str) -> None:
        """A request that used ``adapter`` is done with it."""
        self._users[adapter] -= 1

    def drop(self, request: str, adapter: str) -> None:
        """A request that waits does so no more."""
        left = deque(waiter for waiter in self._waiting[adapter] if waiter.request != request)
        self._deferred -= 1
        if left:
            self._waiting[adapter] = left
        else:
            del self._waiting[adapter]

    def next(self) -> str | None:
        """What to load now for who waits; ``None`` when nobody does, or there is no room."""
        adapter = self._head()
        return adapter if adapter is not None and self._has_room() else None

    def ahead(self, at: float) -> str | None:
        """What to load now though nobody waits for it; ``None`` when there is nothing, or no room."""
        if self._waiting or not self._has_room():
            return None
        free = len(self._users) < self.capacity
        return self._rule.ahead(self._users, self._idle(), free, at)

    def load(self, adapter: str, at: float) -> None:
        """Begin to load what :meth:`next` or :meth:`ahead` said: one goes for it where no slot is free."""
        if len(self._users) >= self.capacity:
            del self._users[self._rule.victim(self._idle(), at)]
            self.changes += 1
        self._users[adapter] = 0
        self.loading = adapter
        self.loads += 1

    def enter(self, at: float) -> list[str]:
        """A load that was under way is over; those who waited for what is loaded by now use it from here on.

        Who waited for a load goes on after it, even if others have waited for a slot for longer.
        """
        arrived, self.loading = self.loading, None
        if arrived is not None:
            self.changes += 1
            self._users.move_to_end(arrived)
        if not self._waiting:
            return []
        if not self._rule.shares:
            return self._enter_in_turn()
        yielding = self._yielding(at)
        if yielding == arrived:
            yielding = None
        let_in: list[str] = []
        for adapter in [each for each in self._waiting if each in self._users and each != yielding]:
            waiters = self._waiting.pop(adapter)
            self._users[adapter] += len(waiters)
            self._users.move_to_end(adapter)
            let_in.extend(waiter.request for waiter in waiters)
        self._deferred -= len(let_in)
        return let_in

    def _enter_in_turn(self) -> list[str]:
        """Those in front, as long as theirs are loaded."""
        let_in: list[str] = []
        while self._waiting:
            adapter = self._in_front()
            if adapter not in self._users:
                break
            let_in.append(self._waiting[adapter][0].request)
            self.drop(let_in[-1], adapter)
            self._users[adapter] += 1
            self._users.move_to_end(adapter)
        return let_in

    def _in_front(self) -> str:
        """The adapter of whoever waits the longest."""
        return min(self._waiting, key=lambda adapter: self._waiting[adapter][0].turn)

    def _head(self) -> str | None:
        """The adapter without a slot that was asked for first."""
        if self._waiting and not self._rule.shares:
            return self._in_front()
        return next((adapter for adapter in self._waiting if adapter not in self._users), None)

    def _has_room(self) -> bool:
        return len(self._users) < self.capacity or not all(self._users.values())

    def _idle(self) -> list[str]:
        """Those that no request uses, the least recently used first."""
        return [adapter for adapter, users in self._users.items() if not users]

    def _yielding(self, at: float) -> str | None:
        """The loaded adapter whose newcomers wait, as somebody has waited for a slot for long."""
        head = self._head() if self._rule.shares else None
        if head is None or len(self._users) < self.capacity or at - self._waiting[head][0].at < PATIENCE_S:
            return None
        return next(iter(self._users))


# HALF_LIFE_S of serve/adapters/usage.py and serve/engine/adapters/slots.py: so long halves a count.
HALF_LIFE_S = 60.0


class Counts:
    """Ageing counts of requests by adapter; each call is given the instant, in seconds."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def add(self, adapter: str, at: float, count: int = 1) -> None:
        """So many more requests for ``adapter``."""
        self._counts[adapter] = (self.of(adapter, at) + count, at)

    def of(self, adapter: str, at: float) -> float:
        """All requests for ``adapter``, each halved every :data:`HALF_LIFE_S`."""
        total, since = self._counts.get(adapter, (0.0, at))
        return total * math.exp((since - at) * math.log(2) / HALF_LIFE_S)

    def rate(self, adapter: str, at: float) -> float:
        """Requests per second."""
        return self.of(adapter, at) * math.log(2) / HALF_LIFE_S


class GuardRule:
    """serve/engine/adapters/slots.py: what is held stays longest, then what would cost most to load again.

    A load costs the same for all here. What is held and not loaded is loaded ahead of requests, for what is
    not held and asked for less, or less than once in a minute. ``news`` are the requests since a beat took
    them.
    """

    shares = True

    def __init__(self) -> None:
        self.news: Counter[str] = Counter()
        self._held: dict[str, int] = {}
        self._counts = Counts()

    def hold(self, adapters: Sequence[str]) -> None:
        """Keep these before others, the first most of all."""
        self._held = {adapter: rank for rank, adapter in enumerate(adapters)}

    def asked(self, adapter: str, at: float) -> None:
        self.news[adapter] += 1
        self._counts.add(adapter, at)

    def victim(self, idle: Sequence[str], at: float) -> str:
        def worth(adapter: str) -> tuple[int, float]:
            rank = self._held.get(adapter)
            return (0 if rank is None else len(self._held) - rank), self._counts.of(adapter, at)

        return min(idle, key=worth)

    def ahead(self, loaded: Collection[str], idle: Sequence[str], free: bool, at: float) -> str | None:
        adapter = next((held for held in self._held if held not in loaded), None)
        if adapter is None or free:
            return adapter
        least = max(self._counts.of(adapter, at), 0.5)
        gives = any(each not in self._held and self._counts.of(each, at) < least for each in idle)
        return adapter if gives else None
