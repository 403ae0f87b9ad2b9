"""A replica in virtual time: an engine's scheduler, slots for adapters, and a rule of which adapter goes.

One thing at a time, as in an engine's step loop: a step, or a load, during which nothing is computed. A
request waits until its adapter is loaded and then goes to the scheduler; what one uses is never unloaded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from policy.engine_model import EngineModel, Limits
from policy.stepping import Request, Scheduler
from sim.arrivals import Arrival

# After a load, requests that run get as much time as it took; before one that nobody waits for, so many times
# that. As serve/engine/adapters.py has it.
PREFETCH_PAUSE = 4.0


class Engine(NamedTuple):
    """What all replicas are alike in: the engine, how many adapters it holds, and the seconds of a load."""

    model: EngineModel
    limits: Limits
    slots: int
    load_s: float


class Rule(Protocol):
    """What a replica does with its slots.

    ``shares`` is whether one load lets in all that wait for the adapter; else they look one after the other.
    """

    shares: bool

    def asked(self, adapter: int, at: float) -> None:
        """A request came for ``adapter``."""
        ...

    def victim(self, idle: Sequence[int], at: float) -> int:
        """Which of ``idle`` goes: those that no request uses, the least recently used first."""
        ...

    def ahead(self, resident: Collection[int], idle: Sequence[int], free: bool, at: float) -> int | None:
        """What to load though nobody waits for it: into a ``free`` slot, or for one of ``idle``."""
        ...


class Done(NamedTuple):
    """What was done: numbers of requests that had their first token, of those that ended; or a load."""

    first: list[int]
    ended: list[int]
    loaded: bool


class Replica:
    """Requests are numbers; ``resident`` are the loaded adapters with how many use each, by last use.

    ``loading`` is the one that is being loaded. ``loads`` and ``requests`` count from the start.
    """

    def __init__(self, engine: Engine, rule: Rule) -> None:
        self.resident: OrderedDict[int, int] = OrderedDict()
        self.loading: int | None = None
        self.loads = self.requests = 0
        self._engine = engine
        self._rule = rule
        self._scheduler = Scheduler(engine.model, engine.limits)
        self._waiting: deque[tuple[int, Arrival]] = deque()
        self._adapters: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._done: Done | None = None
        self._loaded_at = float("-inf")

    @property
    def waited_for(self) -> set[int]:
        """The adapters that requests wait for."""
        return {arrival.adapter for _, arrival in self._waiting}

    def submit(self, number: int, arrival: Arrival, at: float) -> None:
        """A request comes."""
        self.requests += 1
        self._rule.asked(arrival.adapter, at)
        if arrival.adapter in self.resident:
            self.resident.move_to_end(arrival.adapter)
            self._admit(number, arrival)
        else:
            self._waiting.append((number, arrival))

    def begin(self, at: float) -> float | None:
        """Start what is next, if nothing is under way: when it will be done, ``None`` if there is nothing."""
        if self._done is not None:
            return None
        self._let_in()
        busy = self._scheduler.running + self._scheduler.waiting > 0
        if (adapter := self._next(busy, at)) is not None:
            self.loading = adapter
            self.loads += 1
            self._done = Done([], [], loaded=True)
            return at + self._engine.load_s
        if not busy:
            return None
        result = self._scheduler.step()
        first = [number for number in map(int, result.tokens) if number in self._fresh]
        self._fresh.difference_update(first)
        self._done = Done(first, [int(name) for name in result.finished], loaded=False)
        return at + result.duration_s

    def finish(self, at: float) -> Done:
        """What was begun is done at ``at``."""
        done, self._done = self._done, None
        assert done is not None
        for number in done.ended:
            self.resident[self._adapters.pop(number)] -= 1
        if self.loading is not None:
            self.resident[self.loading] = 0
            self.loading = None
            self._loaded_at = at
        return done

    def _next(self, busy: bool, at: float) -> int | None:
        """What to load now; what goes for it is gone."""
        pause = self._engine.load_s * (1.0 if self._waiting else PREFETCH_PAUSE) if busy else 0.0
        if at < self._loaded_at + pause:
            return None
        free = len(self.resident) < self._engine.slots
        idle = [adapter for adapter, users in self.resident.items() if not users]
        if not free and not idle:
            return None
        if self._waiting:
            adapter: int | None = self._waiting[0][1].adapter
        else:
            adapter = self._rule.ahead(self.resident, idle, free, at)
        if adapter is not None and not free:
            del self.resident[self._rule.victim(idle, at)]
        return adapter

    def _let_in(self) -> None:
        """Who waits for what is loaded: all of them, or those in front."""
        if not self._rule.shares:
            while self._waiting and self._waiting[0][1].adapter in self.resident:
                self._admit(*self._waiting.popleft())
            return
        waiting, self._waiting = self._waiting, deque()
        for number, arrival in waiting:
            if arrival.adapter in self.resident:
                self._admit(number, arrival)
            else:
                self._waiting.append((number, arrival))

    def _admit(self, number: int, arrival: Arrival) -> None:
        self.resident[arrival.adapter] += 1
        self._adapters[number] = arrival.adapter
        self._fresh.add(number)
        self._scheduler.submit(Request(str(number), arrival.prompt_tokens, arrival.output_tokens))
