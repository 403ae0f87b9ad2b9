"""Adapter slots of one replica: which adapters are loaded, which is loaded next, and which is evicted for it.

The rules are the same in a replica (:mod:`serve.engine.adapters.loader`) and in the simulator
(:mod:`sim.simulator.adapters`). All instants are seconds of one clock that never goes back.

* A request waits until its adapter is loaded. Requests for loaded adapters are not held up by it.
* An adapter that a request uses is never evicted.
* Of the idle adapters, those outside the placement plan are evicted first, by the cost of loading them again:
  seconds of a load times recent requests. Planned adapters follow, the least valuable first. Ties go to the
  least recently used.
* Planned adapters are loaded ahead of requests while no request waits for a slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from policy.stats.decay import DecayingCount

# An adapter's name, a request that waits, and what a load needs: the caller's types.
A = TypeVar("A", bound=Hashable)
W = TypeVar("W", bound=Hashable)
F = TypeVar("F")

# Half-life of request counts.
HALF_LIFE_S = 60.0
# When an adapter has waited this long for a slot, new requests for one loaded adapter wait, so that it
# becomes idle. Otherwise requests that overlap for a full set of adapters would starve all others.
PATIENCE_S = 2.0
# A prefetch starts no sooner than this many load durations after the load before it.
PREFETCH_PAUSE = 4.0
# The lowest cost of a load in seconds, so that the request rate orders adapters that load in no time.
MIN_LOAD_S = 0.001
# Adapters without a slot whose request counts are remembered.
MAX_REMEMBERED = 4096


class SlotState(StrEnum):
    """Where an adapter is; every state but ``ABSENT`` occupies a slot."""

    ABSENT = "absent"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(slots=True, eq=False)
class SlotEntry(Generic[A, W, F]):
    """One adapter that is loaded, planned, or waited for.

    ``users`` counts the requests that use it, ``waiting`` holds those that wait for it since ``since`` (the
    arrival of the first). ``files`` is what a load needs; without it the adapter cannot be loaded yet.
    ``load_s`` is how many seconds another load would take.
    """

    adapter: A
    requests: DecayingCount
    files: F | None
    state: SlotState = SlotState.ABSENT
    users: int = 0
    waiting: dict[W, None] = field(default_factory=dict)
    since: float = 0.0
    load_s: float = 0.0

    @property
    def idle(self) -> bool:
        return self.state is SlotState.LOADED and not self.users


class AdapterSlots(Generic[A, W, F]):
    """The state of ``capacity`` slots. Entries start with ``files``.

    The caller loads and unloads, and reports it with :meth:`set_state`. ``deferred`` counts waiting requests.
    """

    def __init__(self, capacity: int, files: F | None = None) -> None:
        self.capacity = capacity
        self.deferred = 0
        self._files = files
        self._known: dict[A, SlotEntry[A, W, F]] = {}
        # Entries that occupy a slot, the least recently used first; entries that requests wait for, the
        # longest waiting first.
        self._resident: dict[A, SlotEntry[A, W, F]] = {}
        self._queue: dict[A, SlotEntry[A, W, F]] = {}
        self._planned: dict[A, int] = {}
        self._remembered: dict[A, DecayingCount] = {}
        self._yielding: SlotEntry[A, W, F] | None = None

    def __iter__(self) -> Iterator[SlotEntry[A, W, F]]:
        """Every entry: loaded, planned, or waited for."""
        return iter(tuple(self._known.values()))

    def get(self, adapter: A) -> SlotEntry[A, W, F] | None:
        return self._known.get(adapter)

    def track(self, adapter: A) -> SlotEntry[A, W, F]:
        """The entry of ``adapter``, which is created if there is none."""
        entry = self._known.get(adapter)
        if entry is None:
            requests = self._remembered.pop(adapter, None) or DecayingCount(HALF_LIFE_S)
            entry = self._known[adapter] = SlotEntry(adapter, requests, self._files)
        return entry

    def prune(self, entry: SlotEntry[A, W, F]) -> None:
        """Remove ``entry`` if it is neither loaded, planned nor waited for; its request count is kept."""
        absent = entry.state is SlotState.ABSENT
        unused = absent and not entry.waiting and entry.adapter not in self._planned
        if unused and self._known.get(entry.adapter) is entry:
            del self._known[entry.adapter]
            self._remembered[entry.adapter] = entry.requests
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        if self._yielding is entry and entry.state is not SlotState.LOADED:
            self._yielding = None

    def plan(self, adapters: Sequence[A]) -> None:
        """Prefer these adapters, the most valuable first, over all others."""
        self._planned = {}
        for adapter in adapters:
            self._planned.setdefault(self.track(adapter).adapter, len(self._planned))
        for entry in self:
            self.prune(entry)

    def claim(self, entry: SlotEntry[A, W, F], now: float) -> bool:
        """Count a request; whether it may use the adapter at once. If not, the caller makes it wait."""
        entry.requests.add(now)
        if entry.state is not SlotState.LOADED or self.yields(entry, now):
            return False
        self._use(entry, 1)
        return True

    def wait(self, entry: SlotEntry[A, W, F], waiter: W, now: float) -> None:
        """``waiter`` waits for the adapter."""
        if not entry.waiting:
            entry.since = now
            self._queue[entry.adapter] = entry
        entry.waiting[waiter] = None
        self.deferred += 1

    def drop(self, entry: SlotEntry[A, W, F], waiter: W) -> None:
        """``waiter`` waits no longer; no effect if it does not wait."""
        if waiter in entry.waiting:
            del entry.waiting[waiter]
            self.deferred -= 1
            if not entry.waiting:
                self._queue.pop(entry.adapter, None)

    def reject(self, entry: SlotEntry[A, W, F]) -> list[W]:
        """End the wait of all that wait for the adapter, without it."""
        waiters = list(entry.waiting)
        for waiter in waiters:
            self.drop(entry, waiter)
        return waiters

    def admit(self, entry: SlotEntry[A, W, F]) -> list[W]:
        """Let all that wait for the loaded adapter use it."""
        waiters = self.reject(entry)
        self._use(entry, len(waiters))
        return waiters

    def release(self, entry: SlotEntry[A, W, F]) -> None:
        entry.users -= 1

    def admissible(self, now: float) -> list[SlotEntry[A, W, F]]:
        """Loaded entries whose waiting requests may use them now."""
        loaded = [entry for entry in self._queue.values() if entry.state is SlotState.LOADED]
        return [entry for entry in loaded if not self.yields(entry, now)]

    def set_state(self, entry: SlotEntry[A, W, F], state: SlotState) -> None:
        """The adapter was loaded, unloaded, or is about to be."""
        entry.state = state
        self._resident.pop(entry.adapter, None)
        if state is not SlotState.ABSENT:
            self._resident[entry.adapter] = entry

    def resident(self) -> list[SlotEntry[A, W, F]]:
        """Entries that occupy a slot, the least recently used first."""
        return list(self._resident.values())

    def queued(self) -> list[SlotEntry[A, W, F]]:
        """Entries without a slot that requests wait for, the longest waiting first."""
        return [entry for entry in self._queue.values() if entry.state is SlotState.ABSENT]

    def next(self, now: float) -> tuple[SlotEntry[A, W, F], SlotEntry[A, W, F] | None] | None:
        """What to load now and what to evict for it; ``None`` if there is nothing to load, or no room.

        Requests come before the plan.
        """
        queued = self.queued()
        ready = next((entry for entry in queued if entry.files is not None), None)
        if ready is not None:
            if self.free:
                return ready, None
            victim = self._victim([entry for entry in self._resident.values() if entry.idle], now)
            return None if victim is None else (ready, victim)
        if queued:
            return None
        for entry in self._absent_of_plan():
            if entry.files is not None:
                room, victim = self._room_ahead(entry, now)
                return (entry, victim) if room else None
        return None

    def prefetchable(self, now: float) -> Iterator[SlotEntry[A, W, F]]:
        """Planned entries without a slot that could have one, in the order of the plan."""
        if self.queued():
            return
        for entry in self._absent_of_plan():
            if self._room_ahead(entry, now)[0]:
                yield entry

    def yields(self, entry: SlotEntry[A, W, F], now: float) -> bool:
        """Whether new requests for the loaded ``entry`` wait so that it becomes idle and can be evicted."""
        head = next((queued for queued in self._queue.values() if self._needs_slot(queued)), None)
        if head is None or self.free or now - head.since < PATIENCE_S:
            self._yielding = None
        elif self._yielding is None:
            loaded = [each for each in self._resident.values() if each.state is SlotState.LOADED]
            self._yielding = self._victim(loaded, now)
        return self._yielding is entry

    @property
    def free(self) -> int:
        return self.capacity - len(self._resident)

    def eviction_order(self, entry: SlotEntry[A, W, F], now: float) -> tuple[int, float]:
        """The entry with the least value is evicted first."""
        rank = self._planned.get(entry.adapter)
        planned = 0 if rank is None else len(self._planned) - rank
        return planned, max(entry.load_s, MIN_LOAD_S) * entry.requests.count(now)

    def _victim(self, entries: Sequence[SlotEntry[A, W, F]], now: float) -> SlotEntry[A, W, F] | None:
        return min(entries, key=lambda entry: self.eviction_order(entry, now), default=None)

    def _needs_slot(self, entry: SlotEntry[A, W, F]) -> bool:
        return entry.state is SlotState.ABSENT and entry.files is not None

    def _absent_of_plan(self) -> Iterator[SlotEntry[A, W, F]]:
        planned = (self._known[adapter] for adapter in self._planned)
        return (entry for entry in planned if entry.state is SlotState.ABSENT)

    def _room_ahead(self, entry: SlotEntry[A, W, F], now: float) -> tuple[bool, SlotEntry[A, W, F] | None]:
        """Whether ``entry`` may have a slot before a request needs it, and the victim.

        A victim is outside the plan and had fewer requests than ``entry``, or less than one per half-life.
        """
        if self.free:
            return True, None
        bound = max(entry.requests.count(now), 0.5)
        unplanned = (
            each
            for each in self._resident.values()
            if each.idle and each.adapter not in self._planned and not each.waiting
        )
        victim = self._victim([each for each in unplanned if each.requests.count(now) < bound], now)
        return victim is not None, victim

    def _use(self, entry: SlotEntry[A, W, F], requests: int) -> None:
        entry.users += requests
        self.set_state(entry, entry.state)
