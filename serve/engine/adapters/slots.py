"""The slots of a replica: what is loaded or waited for there, what comes next, and what goes for it.

Plain books without I/O: :mod:`serve.engine.adapters.loader` reads its next step from them, and takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from policy.stats.decay import DecayingCount
from policy.wire.catalog import served_name
from policy.wire.heartbeat import AdapterRef

# How fast what was asked for is forgotten: a minute without a request halves the count.
HALF_LIFE_S = 60.0
# After so long without a free slot whoever waits comes before newcomers of one adapter that has one.
PATIENCE_S = 2.0
# A load is taken to cost this at least, so that what is asked for more always counts for more.
LEAST_S = 0.001
# The counts of so many adapters without a slot are remembered.
MAX_REMEMBERED = 4096


class SlotState(StrEnum):
    """Where an adapter is; all but ``WANTED`` take a slot."""

    WANTED = "wanted"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class AdapterSlot:
    """One version of an adapter here.

    ``users`` counts requests that the engine may be computing with it, ``waiting`` are those that came
    since ``since`` and may not use it yet. ``path`` is where its files are, once they are read. ``files_s``
    is how long it took to have them there, ``load_s`` what it costs to load it from there again.
    """

    name: str
    digest: str
    served: str
    rate: DecayingCount
    state: SlotState = SlotState.WANTED
    users: int = 0
    waiting: dict[asyncio.Future[float], None] = field(default_factory=dict)
    since: float = 0.0
    path: Path | None = None
    files_s: float = 0.0
    load_s: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether it is loaded and no request has any part in it."""
        return self.state is SlotState.LOADED and not self.users


class Slots:
    """The books of ``capacity`` slots; instants are seconds of any clock that never goes back."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._known: dict[str, AdapterSlot] = {}
        self._held: dict[str, int] = {}
        self._remembered: dict[str, DecayingCount] = {}
        self._yielding: AdapterSlot | None = None

    def __iter__(self) -> Iterator[AdapterSlot]:
        """Everything that is loaded, on its way or waited for."""
        return iter(tuple(self._known.values()))

    def get(self, served: str) -> AdapterSlot | None:
        """What is known of ``served``."""
        return self._known.get(served)

    def enter(self, wanted: AdapterRef) -> AdapterSlot:
        """The adapter, from now on in the books."""
        served = served_name(wanted.name, wanted.digest)
        adapter = self._known.get(served)
        if adapter is None:
            rate = self._remembered.pop(served, None) or DecayingCount(HALF_LIFE_S)
            adapter = self._known[served] = AdapterSlot(wanted.name, wanted.digest, served, rate)
        return adapter

    def settle(self, adapter: AdapterSlot) -> None:
        """Strike ``adapter`` from the books when nothing keeps it there; its count is remembered."""
        kept = adapter.state is not SlotState.WANTED or adapter.waiting or adapter.served in self._held
        if not kept and self._known.get(adapter.served) is adapter:
            del self._known[adapter.served]
            self._remembered[adapter.served] = adapter.rate
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        if self._yielding is adapter and adapter.state is not SlotState.LOADED:
            self._yielding = None

    def hold(self, wanted: Sequence[AdapterRef]) -> None:
        """Keep these before others, the first most of all."""
        self._held = {}
        for each in wanted:
            self._held.setdefault(self.enter(each).served, len(self._held))
        for adapter in self:
            self.settle(adapter)

    def held(self) -> Iterable[AdapterSlot]:
        """Those to keep, the most valuable first."""
        return (self._known[served] for served in self._held)

    def asked_for(self) -> list[AdapterSlot]:
        """Those without a slot that requests wait for, in the order in which they were asked for."""
        wanted = [a for a in self._known.values() if a.state is SlotState.WANTED and a.waiting]
        return sorted(wanted, key=lambda adapter: adapter.since)

    def next(self, now: float) -> tuple[AdapterSlot, AdapterSlot | None] | None:
        """What to load now, and what to unload for it; ``None`` when there is nothing, or no room.

        Only what no request uses goes; requests come before what is held.
        """
        asked = self.asked_for()
        ready = next((adapter for adapter in asked if adapter.path is not None), None)
        if ready is not None:
            if self.free:
                return ready, None
            victim = min((a for a in self._known.values() if a.idle), key=self._order(now), default=None)
            return None if victim is None else (ready, victim)
        if asked:
            return None
        for adapter in self.held():
            if adapter.state is SlotState.WANTED and adapter.path is not None:
                room, victim = self._spare(adapter, now)
                return (adapter, victim) if room else None
        return None

    def ahead(self, now: float) -> Iterator[AdapterSlot]:
        """What is held, is not here, and could have a slot, in order."""
        if self.asked_for():
            return
        for adapter in self.held():
            if adapter.state is SlotState.WANTED and self._spare(adapter, now)[0]:
                yield adapter

    def yields(self, adapter: AdapterSlot, now: float) -> bool:
        """Whether newcomers for a loaded ``adapter`` must wait for one that has waited long for a slot.

        Otherwise requests that follow each other for a full set of adapters would keep all others out.
        """
        head = next((each for each in self.asked_for() if each.path is not None), None)
        if head is None or self.free or now - head.since < PATIENCE_S:
            self._yielding = None
        elif self._yielding is None:
            loaded = (each for each in self._known.values() if each.state is SlotState.LOADED)
            self._yielding = min(loaded, key=self._order(now), default=None)
        return self._yielding is adapter

    @property
    def free(self) -> int:
        """Slots that nothing takes."""
        return self.capacity - sum(a.state is not SlotState.WANTED for a in self._known.values())

    def _spare(self, adapter: AdapterSlot, now: float) -> tuple[bool, AdapterSlot | None]:
        """Whether ``adapter`` may have a slot before anybody asks for it, and who goes for it.

        What is not held goes when it was asked for less than the other, or less than once in a minute.
        """
        if self.free:
            return True, None
        bound = max(adapter.rate.count(now), 0.5)
        unlisted = [
            a for a in self._known.values() if a.idle and a.served not in self._held and not a.waiting
        ]
        victim = min((a for a in unlisted if a.rate.count(now) < bound), key=self._order(now), default=None)
        return victim is not None, victim

    def _order(self, now: float) -> _Order:
        return _Order(self._held, now)


@dataclass(slots=True)
class _Order:
    """Who goes first: what is not held, by reload seconds times requests; then what is, the last first."""

    held: dict[str, int]
    now: float

    def __call__(self, adapter: AdapterSlot) -> tuple[int, float]:
        rank = self.held.get(adapter.served)
        listed = 0 if rank is None else len(self.held) - rank
        return listed, max(adapter.load_s, LEAST_S) * adapter.rate.count(self.now)
