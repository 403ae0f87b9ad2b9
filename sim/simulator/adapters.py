"""The adapters of a simulated model: the slots of a replica, two baselines, and the placement on replicas.

Adapters and requests are strings, instants are seconds of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from policy.adapter_placement.plan import plan
from policy.adapter_placement.slots import HALF_LIFE_S, AdapterSlots, SlotEntry, SlotState
from policy.adapter_placement.types import EMPTY, PlacementHost, PlacementPlan, VersionDemand
from policy.stats.decay import DecayingCount

Entry = SlotEntry[str, str, bool]


class SimulatedSlots(AdapterSlots[str, str, bool]):
    """The slots of a replica in virtual time: all files are present, one adapter loads at a time.

    ``loading`` is the adapter being loaded, ``loads`` counts loads, ``changes`` changes of the set of loaded
    adapters, ``requests`` those since the last heartbeat.
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
        """End the current load; returns the requests that may use their adapters from now on.

        Requests that waited for this load run even if others have waited longer for a slot.
        """
        loaded = self.end_load()
        admitted = [] if loaded is None else self.admit(loaded)
        return admitted + [request for entry in self.admissible(at) for request in self.admit(entry)]

    def end_load(self) -> Entry | None:
        """End the current load; returns its entry."""
        if self.loading is None:
            return None
        entry = self.track(self.loading)
        self.set_state(entry, SlotState.LOADED)
        self.loading = None
        self.changes += 1
        return entry


class LeastRecentlyUsedSlots(SimulatedSlots):
    """Evict the least recently used adapter."""

    def eviction_order(self, entry: Entry, now: float) -> tuple[int, float]:
        return 0, 0.0


class SequentialLoadSlots(LeastRecentlyUsedSlots):
    """Waiting requests get their adapters one after the other, as if loads held one lock."""

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


class SimulatedPlacement:
    """The controller's placement of one model's adapters: heartbeats in, a plan out.

    It plans with the production algorithm from request rates alone; :mod:`serve.adapters.placement_loop`
    also uses rising rates and waiting requests. A load takes ``load_s`` seconds; ``key`` is an adapter's
    64-bit hash.
    """

    def __init__(self, load_s: float, key: Callable[[str], int]) -> None:
        self.plan: PlacementPlan = EMPTY
        self._load_s = load_s
        self._key = key
        self._demand: dict[str, DecayingCount] = {}
        # Since the last plan: the sum of requests in flight over heartbeats, and the number of heartbeats.
        self._in_flight = self._beats = 0

    def beat(self, replica: str, slots: SimulatedSlots, in_flight: int, at: float) -> None:
        """A heartbeat: count the new requests and those in flight, and hand the plan to the replica."""
        for adapter, requests in slots.requests.items():
            self._demand.setdefault(adapter, DecayingCount(HALF_LIFE_S)).add(at, requests)
        slots.requests.clear()
        self._in_flight += in_flight
        self._beats += 1
        slots.plan(self.plan.hold.get(replica, ()))

    def replan(self, hosts: Iterable[PlacementHost], at: float) -> None:
        """Plan for these replicas."""
        listed = list(hosts)
        rates = {adapter: requests.rate(at) for adapter, requests in self._demand.items()}
        # Little's law: the mean number of requests in flight over their arrival rate.
        in_flight = self._in_flight * len(listed) / self._beats if self._beats else 0.0
        service_s = in_flight / sum(rates.values()) if rates else 0.0
        self._in_flight = self._beats = 0
        demands = [
            VersionDemand(name=name, key=self._key(name), rate=rate, load_s=self._load_s, service_s=service_s)
            for name, rate in rates.items()
        ]
        self.plan = plan(listed, demands, self.plan, at)
