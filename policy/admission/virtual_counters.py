"""Virtual token counters of flows that share one capacity: the least served is next.

Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588. A counter holds the tokens
that a flow was served, divided by its weight. A flow that comes back after a pause is lifted to the
least counter of those that wait, less a credit of at most :data:`CREDIT` for what it left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop
from typing import Final, Generic, TypeVar

from policy.admission.indexed_heap import IndexedHeap

# In weighted tokens: some requests of common size. Without a credit, as in the paper, the second of two
# requests that a quiet flow sends at once waits until the busy ones were served as much as the first cost.
# With one of any size, a flow that slept for an hour would keep the others waiting for as long. Linux's fair
# scheduler bounds the credit of sleepers in the same way.
CREDIT: Final = 8192.0


class VirtualCounter:
    """One flow. ``tokens`` of it wait, the oldest with ``ticket``; ``running`` requests of it run.

    ``floor`` is the level that it was last lifted to: ``counter`` is at most :data:`CREDIT` below, also after
    refunds. ``back`` is what was refunded since it last waited, which the next lift leaves to it: otherwise a
    flow that waits for each answer before its next request would lose its refunds.
    """

    __slots__ = ("back", "counter", "floor", "name", "running", "ticket", "tokens", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.counter = self.floor = self.back = 0.0
        self.tokens = 0
        self.ticket = 0
        self.running = 0


F = TypeVar("F", bound=VirtualCounter)


class VirtualCounters(Generic[F]):
    """Flows by name; beyond ``most``, those that neither wait nor run are forgotten from time to time."""

    def __init__(self, make: Callable[[str], F], most: int) -> None:
        self._make = make
        self._most = most
        # With so many flows, those that are idle are looked for.
        self._full = most
        self._flows: dict[str, F] = {}
        self._served = 0.0
        self.waiting: IndexedHeap[F] = IndexedHeap()
        self.weight = 0.0

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def level(self) -> float:
        """What flows are lifted to; the credit of the first that waits is no part of it."""
        least = self.waiting.least() if self.waiting.puts else None
        return self._served if least is None else max(least[1], least[0].floor)

    def find(self, name: str) -> F | None:
        return self._flows.get(name)

    def flow(self, name: str) -> F:
        """The flow; a new one has its whole credit."""
        flow = self._flows.get(name)
        if flow is None:
            if len(self._flows) >= self._full:
                self._forget()
            flow = self._flows[name] = self._make(name)
            flow.floor = self.level
            flow.counter = flow.floor - CREDIT
        return flow

    def join(self, flow: F, ticket: int) -> None:
        """A request with ``ticket`` waits: rank the flow, and lift it if it was idle."""
        if flow not in self.waiting:
            self.lift(flow)
            self.weight += flow.weight
        elif flow.ticket <= ticket:
            return
        flow.ticket = ticket
        self.waiting.put(flow, flow.counter, ticket)

    def leave(self, flow: F) -> None:
        if self.waiting.drop(flow):
            self.weight = self.weight - flow.weight if len(self.waiting) else 0.0

    def among(self, flows: list[F]) -> Iterator[tuple[F, float]]:
        """These ``flows``, all of which wait, with their counters in the order of :attr:`waiting`."""
        ahead = [(flow.counter, flow.ticket, flow) for flow in flows]
        heapify(ahead)
        while ahead:
            counter, _, flow = heappop(ahead)
            yield flow, counter

    def lift(self, flow: F) -> None:
        """It was idle: it is owed no more than its credit of what the others were served meanwhile."""
        flow.floor = max(flow.floor, self.level - flow.back)
        flow.back = 0.0
        flow.counter = max(flow.counter, flow.floor - CREDIT)

    def begin(self, name: str, tokens: int) -> F:
        """A request of the named flow begins and is charged ``tokens``; a flow that was idle is lifted."""
        flow = self._flows.get(name)
        if flow is None:
            flow = self.flow(name)
        waiting = self.waiting.puts
        if not flow.tokens:
            if waiting:
                self.lift(flow)
            else:  # the common case of :meth:`lift`, to the tokens served so far
                level, flow.back = self._served - flow.back, 0.0
                flow.floor = level = level if level > flow.floor else flow.floor
                flow.counter = flow.counter if flow.counter > level - CREDIT else level - CREDIT
        self._served = flow.counter if flow.counter > self._served else self._served
        flow.counter += tokens / flow.weight
        flow.running += 1
        if waiting and flow in waiting:
            self.waiting.put(flow, flow.counter, flow.ticket)
        return flow

    def correct(self, flow: F, tokens: int) -> None:
        """It was charged ``tokens`` too little, or too much if negative."""
        before = flow.counter
        flow.counter = max(before + tokens / flow.weight, flow.floor - CREDIT)
        if flow in self.waiting.puts:
            self.waiting.put(flow, flow.counter, flow.ticket)
        elif tokens < 0:
            flow.back += before - flow.counter

    def _forget(self) -> None:
        """Drop idle flows, the least served first: a lift restores those. Half of ``most`` may stay."""
        idle = [flow for flow in self._flows.values() if not flow.running and flow not in self.waiting]
        idle.sort(key=lambda flow: flow.counter)
        for flow in idle[: len(self._flows) - self._most + max(1, self._most // 2)]:
            del self._flows[flow.name]
        # Where too many wait or run, each further flow would look in vain.
        self._full = max(self._most, 2 * len(self._flows))
