"""The dispatcher alone, over replicas without a network: what it looks at, and in how many turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Set, ValuesView
from typing import Any

import pytest

from policy.admission.dispatcher import MOST_COMPARED, MOST_REJECTED, Dispatcher, DispatchTicket
from policy.admission.queue import QueueLimits
from policy.admission.retry_policy import RejectionCause
from policy.request import Request
from policy.routing.cost import Candidate, CostEstimate
from policy.routing.replica_health import HealthCounters, ReplicaHealth
from policy.types import Priority

AT = 1.0


class Slots:
    """The slots of one replica."""

    def __init__(self, view: Candidate, health: ReplicaHealth) -> None:
        self.view = view
        self.breaker = health.join()

    def begin(self, tokens: int) -> bool:
        self.view.in_flight += 1
        return False

    def first_token(self, tokens: int, at: float) -> None:
        pass

    def end(self) -> None:
        self.view.in_flight -= 1


class Pool:
    """Replicas with a bound each, of which the first with room takes any request.

    ``sends`` is whether the router sends a request there now; ``lasts`` which requests end before all of
    them are closed; ``broken`` are the adapters that none can load.
    """

    ready, down, gives_way = True, False, False

    def __init__(self, bounds: dict[str, int]) -> None:
        self.health = ReplicaHealth(HealthCounters(), lambda: 0.5)
        self.views = [Candidate(name, i, bound=bound) for i, (name, bound) in enumerate(bounds.items())]
        self.slots = {view.id: Slots(view, self.health) for view in self.views}
        self.closing = False
        self.broken: set[str] = set()
        # The adapters of replicas that load no others; looks at a single request or adapter.
        self.lists: dict[str, frozenset[str]] = {}
        self.asked = self.compared = 0
        self.sends: Callable[[Request, Candidate], bool] = lambda request, candidate: True
        self.lasts: Callable[[Request], bool] = lambda request: True

    def dispatcher(
        self, resolved: Callable[[DispatchTicket[Slots]], None] = lambda ticket: None
    ) -> Dispatcher[Slots]:
        return Dispatcher(self, self.health, weight=lambda tenant: 1.0, resolved=resolved)

    def fill(self) -> None:
        for view in self.views:
            view.in_flight = view.bound

    def ttft_slo_s(self, priority: Priority) -> float | None:
        return None

    def bounds(self, request: Request, queued: int) -> QueueLimits:
        return QueueLimits(1_000_000, 1_000_000)

    def candidates(self) -> list[Candidate]:
        return list(self.views)

    def full(self) -> list[Candidate]:
        return []

    def replica(self, candidate: Candidate) -> Slots:
        return self.slots[candidate.id]

    def serves(self, candidate: Candidate, adapter: str) -> bool:
        self.asked += 1
        return not adapter or candidate.id not in self.lists or adapter in self.lists[candidate.id]

    def unserved(self, adapters: Set[str], candidates: list[Candidate]) -> set[str]:
        left = set(adapters)
        for each in candidates:
            left = left - self.lists[each.id] - {""} if each.id in self.lists else set()
        return left

    def choose(self, request: Request, candidates: list[Candidate], at: float) -> CostEstimate | None:
        self.compared += len(candidates)
        for each in candidates:
            if each.in_flight < each.bound and self.sends(request, each):
                return CostEstimate(each)
        return None

    def loss_s(self, request: Request, candidate: Candidate, replicas: int, at: float) -> float:
        return 0.0

    def unavailable(self, at: float) -> bool:
        return False

    def cannot_load(self, adapter: str) -> bool:
        return adapter in self.broken

    def service_s(self, request: Request) -> float:
        return 0.0

    def remaining_s(self, request: Request, quote: CostEstimate, ran_s: float) -> float:
        return 0.0

    def lasting(self, request: Request, candidates: list[Candidate], at: float) -> list[Candidate]:
        self.asked += 1
        return candidates if self.lasts(request) else []

    def sent(self, request: Request, quote: CostEstimate, at: float) -> tuple[int, ...]:
        return ()

    def timed(self, request: Request, quote: CostEstimate, ttft_s: float, at: float) -> None:
        pass

    def paced(self, quote: CostEstimate, gap_s: float) -> None:
        pass

    def counted(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def queued(self, change: int, rank: int) -> None:
        pass

    def granted(self, candidates: list[Candidate], rank: int, waiting: int, at: float) -> list[Candidate]:
        return candidates


def wait(
    dispatcher: Dispatcher[Slots], only: frozenset[str] | None = None, **more: Any
) -> DispatchTicket[Slots]:
    """A request that waits for a slot."""
    request = Request("m", **{"size": 1, "output_tokens": 9, **more})
    request.only = only
    ticket = DispatchTicket(dispatcher, request)
    ticket.enter(AT)
    assert ticket.queued
    return ticket


class Visited(dict[int, DispatchTicket[Slots]]):
    """The waiting tickets; ``visits`` counts those that were visited one by one."""

    visits = 0

    def __getitem__(self, ticket: int) -> DispatchTicket[Slots]:
        self.visits += 1
        return super().__getitem__(ticket)

    def values(self) -> ValuesView[DispatchTicket[Slots]]:
        self.visits += len(self)
        return super().values()


def test_an_adapter_that_failed_rejects_those_that_wait_for_it_and_looks_at_no_others() -> None:
    pool = Pool({"a": 1})
    pool.fill()
    dispatcher = pool.dispatcher()
    dispatcher.waiting = visited = Visited()
    waiting = [wait(dispatcher, adapter=f"adapter-{i % 100}") for i in range(300)]
    plain = wait(dispatcher)
    pool.broken = {"adapter-7", "unknown"}
    dispatcher.give_up({"adapter-7", "adapter-8", "unknown"}, AT)
    rejected = [ticket for ticket in waiting if ticket.rejection]
    assert rejected == [waiting[7], waiting[107], waiting[207]]
    assert {ticket.rejection.cause for ticket in rejected if ticket.rejection} == {RejectionCause.ADAPTER}
    assert plain.queued and len(dispatcher.waiting) == len(dispatcher.queue) == 298
    assert visited.visits == 0


@pytest.mark.parametrize("why", ["failed", "only", "closing", "loads"])
def test_an_offer_looks_at_few_of_those_that_have_no_place(why: str) -> None:
    pool = Pool({"a": 4, "b": 1})
    pool.fill()
    dispatcher = pool.dispatcher()
    dispatcher.waiting = visited = Visited()
    for i in range(1000):
        avoid = {"a"} if why == "failed" else set()
        only = frozenset({"b"}) if why == "only" else None
        wait(dispatcher, only, avoid=avoid, adapter=f"adapter-{i}" if why == "loads" else "")
    pool.views[0].in_flight = 0
    pool.closing = why == "closing"
    pool.lasts = lambda request: False
    pool.sends = lambda request, candidate: not request.adapter
    visited.visits = 0
    assert dispatcher.offer(AT)
    assert len(dispatcher.waiting) == 1000
    assert visited.visits < 10
    # One that has a place is given it at once.
    pool.lasts = lambda request: request.output_tokens <= 1
    fits = wait(dispatcher, output_tokens=1, priority=Priority.BATCH)
    dispatcher.offer(AT)
    assert fits.replica is not None and len(dispatcher.waiting) == 1000


@pytest.mark.parametrize("fit", [0, 1])
def test_an_offer_looks_at_few_of_different_lengths_that_end_too_late(fit: int) -> None:
    pool = Pool({"a": 4})
    pool.fill()
    dispatcher = pool.dispatcher()
    chance = random.Random(1)  # noqa: S311 - the same each time
    for _ in range(3000):
        prompt, answer, longest = (int(2 ** chance.uniform(low, low + 8)) for low in (4, 3, 9))
        wait(dispatcher, prompt_tokens=prompt, output_tokens=answer, long_tokens=longest)
    fits = [wait(dispatcher, prompt_tokens=5000, long_tokens=400) for _ in range(fit)]
    pool.views[0].in_flight = pool.asked = 0
    pool.closing, pool.lasts = True, lambda request: request.long_tokens < 500
    assert dispatcher.offer(AT)
    assert len(dispatcher.waiting) == 3000 and pool.asked < 100
    assert all(ticket.replica is not None for ticket in fits)


@pytest.mark.parametrize("adapter", ["", "listed"])
@pytest.mark.parametrize("tenants", [1, 3000])
def test_adapters_that_no_replica_with_room_serves_are_looked_at_together(adapter: str, tenants: int) -> None:
    pool = Pool({"a": 2, "b": 1})
    pool.fill()
    pool.lists = {"a": frozenset({"listed"}), "b": frozenset(f"adapter-{i}" for i in range(3000))}
    dispatcher = pool.dispatcher()
    dispatcher.waiting = visited = Visited()
    for i in range(3000):
        wait(dispatcher, adapter=f"adapter-{i}", tenant=f"tenant-{i % tenants}")
    pool.views[0].in_flight = pool.asked = visited.visits = 0
    assert dispatcher.offer(AT)
    assert len(dispatcher.waiting) == 3000 and pool.asked < 10 and visited.visits < 10
    fits = wait(dispatcher, adapter=adapter, priority=Priority.BATCH)
    pool.asked = visited.visits = 0
    dispatcher.offer(AT)
    assert fits.replica is not None and len(dispatcher.waiting) == 3000
    assert pool.asked < 10 and visited.visits < 10


def test_slots_of_many_replicas_are_given_in_several_offers() -> None:
    pool = Pool({str(i): 1 for i in range(1000)})
    pool.fill()
    dispatcher = pool.dispatcher()
    waiting = [wait(dispatcher) for _ in range(30)]
    for view in pool.views:
        view.in_flight = 0
    done = False
    while not done:
        pool.compared = 0
        done = dispatcher.offer(AT)
        assert pool.compared <= 3 * MOST_COMPARED
    assert all(ticket.replica is not None for ticket in waiting)


def test_those_that_no_longer_wait_for_an_adapter_are_not_rejected() -> None:
    pool = Pool({"a": 1})
    pool.fill()
    dispatcher = pool.dispatcher()
    granted, left, waits = [wait(dispatcher, adapter="sql") for _ in range(3)]
    pool.views[0].in_flight = 0
    assert dispatcher.offer(AT) and granted.replica is not None
    left.leave(AT)
    pool.broken = {"sql"}
    dispatcher.give_up({"sql"}, AT)
    assert granted.rejection is None and left.rejection is None and waits.rejection is not None
    dispatcher.give_up({"sql"}, AT)
    assert not dispatcher.waiting


def test_requests_for_adapters_that_failed_are_rejected_some_at_a_time() -> None:
    pool = Pool({"a": 1})
    pool.fill()
    rejected: list[DispatchTicket[Slots]] = []
    dispatcher = pool.dispatcher(rejected.append)
    popular = [wait(dispatcher, adapter="popular") for _ in range(2 * MOST_REJECTED)]
    others = [wait(dispatcher, adapter=f"adapter-{i}") for i in range(MOST_REJECTED)]
    loads = wait(dispatcher, adapter="loads")
    adapters = {ticket.request.adapter for ticket in [*popular, *others, loads]}
    pool.broken = adapters - {"loads"}
    done, turns = False, 0
    while not done:
        before, turns = len(rejected), turns + 1
        done = dispatcher.give_up(adapters, AT)
        assert len(rejected) - before <= MOST_REJECTED
    assert turns <= 6
    assert set(rejected) == {*popular, *others} and loads.queued and not adapters


def test_requests_are_rejected_some_at_a_time_the_first_to_expire_or_arrive_first() -> None:
    for expires in (True, False):
        pool = Pool({"a": 1})
        pool.fill()
        rejected: list[DispatchTicket[Slots]] = []
        dispatcher = pool.dispatcher(rejected.append)
        waiting = [wait(dispatcher, deadline=1000.0 - i) for i in range(2 * MOST_REJECTED + 1)]
        reject = dispatcher.expire if expires else dispatcher.dismiss
        calls = [(reject(1000.0), len(rejected)) for _ in range(3)]
        assert calls == [(False, MOST_REJECTED), (False, 2 * MOST_REJECTED), (True, len(waiting))]
        assert rejected == (waiting[::-1] if expires else waiting) and not dispatcher.waiting
