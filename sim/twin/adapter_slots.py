"""Adapter slots of a simulated replica: the rules of a real one, and two baselines.

Adapters and requests are strings, instants are seconds of the run.
"""

from __future__ import annotations

from collections import Counter

from policy.placement.slots import AdapterSlots, SlotEntry, SlotState

Entry = SlotEntry[str, str, bool]


class TwinSlots(AdapterSlots[str, str, bool]):
    """The slots of a replica in virtual time, where files are always there and one adapter loads at a time.

    ``loading`` is the adapter that is being loaded, ``loads`` counts loads, ``changes`` counts changes of the
    set of loaded adapters. ``requests`` are those since the last heartbeat, which takes them.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, files=True)
        self.loads = self.changes = 0
        self.loading: str | None = None
        self.requests: Counter[str] = Counter()

    @property
    def loaded(self) -> tuple[str, ...]:
        """The loaded adapters, the least recently used first."""
        return tuple(each.adapter for each in self.resident() if each.state is SlotState.LOADED)

    @property
    def awaited(self) -> tuple[str, ...]:
        """The adapters that requests wait for."""
        return tuple(self._queue)

    def submit(self, request: str, adapter: str, at: float) -> bool:
        """Whether ``request`` may use ``adapter`` at once; if not, it waits."""
        self.requests[adapter] += 1
        entry = self.track(adapter)
        if self.claim(entry, at):
            return True
        self.wait(entry, request, at)
        return False

    def finish(self, adapter: str) -> None:
        """A request no longer uses ``adapter``."""
        self.release(self.track(adapter))

    def abort(self, request: str, adapter: str) -> None:
        """A waiting request is gone."""
        entry = self.track(adapter)
        self.drop(entry, request)
        self.prune(entry)

    def begin_load(self, entry: Entry, victim: Entry | None) -> None:
        """Evict ``victim`` and start to load ``entry``, as :meth:`next` returned them."""
        if victim is not None:
            self.set_state(victim, SlotState.ABSENT)
            self.prune(victim)
            self.changes += 1
        self.set_state(entry, SlotState.LOADING)
        self.loading = entry.adapter
        self.loads += 1

    def admit_waiting(self, at: float) -> list[str]:
        """End the load under way, if any; the requests that may use their adapters from now on.

        Requests that waited for this load go on even if others have waited longer for a slot.
        """
        loaded = self.end_load()
        admitted = [] if loaded is None else self.admit(loaded)
        return admitted + [request for entry in self.admissible(at) for request in self.admit(entry)]

    def end_load(self) -> Entry | None:
        """End the load under way; the entry that is loaded by it."""
        if self.loading is None:
            return None
        entry = self.track(self.loading)
        self.set_state(entry, SlotState.LOADED)
        self.loading = None
        self.changes += 1
        return entry


class LeastRecentlyUsedSlots(TwinSlots):
    """Evict the least recently used adapter."""

    def eviction_order(self, entry: Entry, now: float) -> tuple[int, float]:
        return 0, 0.0


class InTurnSlots(LeastRecentlyUsedSlots):
    """Requests that wait get their adapters one after the other, as if each loaded under one lock."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._turns: dict[str, Entry] = {}

    def wait(self, entry: Entry, waiter: str, now: float) -> None:
        super().wait(entry, waiter, now)
        self._turns[waiter] = entry

    def drop(self, entry: Entry, waiter: str) -> None:
        super().drop(entry, waiter)
        self._turns.pop(waiter, None)

    def queued(self) -> list[Entry]:
        front = next(iter(self._turns.values()), None)
        return [] if front is None or front.state is not SlotState.ABSENT else [front]

    def yields(self, entry: Entry, now: float) -> bool:
        return False

    def admit_waiting(self, at: float) -> list[str]:
        self.end_load()
        admitted: list[str] = []
        for request, entry in tuple(self._turns.items()):
            if entry.state is not SlotState.LOADED:
                break
            self.drop(entry, request)
            self._use(entry, 1)
            admitted.append(request)
        return admitted
