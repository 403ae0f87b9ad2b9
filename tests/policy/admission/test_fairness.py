"""The laws of fairness: equal weights get equal tokens, weights are respected, and a pause earns nothing."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.admission.fairness import FairQueue, cost, has_fair_share
from policy.admission.virtual_counters import VirtualCounter, VirtualCounters
from policy.request import Request

TENANTS = ("a", "b", "c")


class Desk:
    """Tickets in order, and requests served one at a time in the fair order."""

    def __init__(self, fair: FairQueue) -> None:
        self.fair = fair
        self.tickets = 0
        self.served: Counter[str] = Counter()
        self.by_adapter: Counter[tuple[str, str]] = Counter()

    def ask(self, tenant: str, tokens: int = 10, adapter: str = "") -> Request:
        self.tickets += 1
        request = Request("m", tenant=tenant, adapter=adapter, prompt_tokens=tokens, ticket=self.tickets)
        self.fair.add(request, returned=False)
        return request

    def serve(self) -> Request:
        request = next(self.fair.walk()).request
        self.fair.remove(request)
        self.fair.ended(self.fair.charge(request))
        self.served[request.tenant] += cost(request)
        self.by_adapter[request.tenant, request.adapter] += cost(request)
        return request


def jain(shares: list[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5), st.randoms())
def test_weights_are_respected(weights: list[float], rng: random.Random) -> None:
    share = {str(i): weight for i, weight in enumerate(weights)}
    desk = Desk(FairQueue(share.__getitem__))
    for _ in range(100):
        for tenant in share:
            desk.ask(tenant, rng.randint(1, 100))
    for _ in range(100):
        desk.serve()
    # While all are backlogged, no two differ by more than the largest request of each.
    normal = [desk.served[tenant] / weight for tenant, weight in share.items()]
    assert max(normal) - min(normal) <= 2 * 100 / min(weights)


def test_adapters_share_within_their_tenant() -> None:
    desk = Desk(FairQueue())
    for _ in range(100):
        desk.ask("a", adapter="popular")
        desk.ask("b", adapter="")
    for _ in range(40):
        desk.ask("a", adapter="rare")
    for _ in range(80):
        desk.serve()
    assert desk.served["a"] == desk.served["b"] == 400
    assert desk.by_adapter["a", "popular"] == desk.by_adapter["a", "rare"] == 200


def test_a_pause_earns_nothing() -> None:
    desk = Desk(FairQueue())
    for _ in range(100):
        desk.ask("steady")
        desk.serve()
    for _ in range(10):
        desk.ask("steady")
        desk.ask("back")
    assert [desk.serve().tenant for _ in range(6)].count("back") == 3


def test_turns_are_tagged_by_what_would_have_been_served() -> None:
    desk = Desk(FairQueue(lambda tenant: 2.0 if tenant == "a" else 1.0))
    for _ in range(3):
        desk.ask("a", 10)
        desk.ask("b", 10)
    turns = [(turn.request.tenant, turn.tag) for turn in desk.fair.walk()]
    assert turns == [("a", 0), ("b", 0), ("a", 5), ("b", 10), ("a", 10), ("b", 20)]


def test_the_longest_backlog_makes_room_and_never_for_a_longer_one() -> None:
    desk = Desk(FairQueue())
    desk.ask("long")
    youngest = desk.ask("long")
    desk.ask("short")
    newcomer = Request("m", tenant="short", prompt_tokens=5)
    assert desk.fair.victim(newcomer) is youngest
    assert desk.fair.victim(Request("m", tenant="long", prompt_tokens=5)) is None
    assert desk.fair.victim(Request("m", tenant="short", prompt_tokens=50)) is None
    assert desk.fair.victim(None) is youngest


def test_what_is_ahead_of_a_newcomer_is_its_share_of_the_backlog() -> None:
    desk = Desk(FairQueue())
    assert desk.fair.ahead(Request("m", tenant="a")) == 0
    for _ in range(10):
        desk.ask("a", 10)
    desk.ask("b", 10)
    assert desk.fair.ahead(Request("m", tenant="b")) == 20
    assert desk.fair.ahead(Request("m", tenant="c")) == 0
    assert desk.fair.ahead(Request("m", tenant="a")) == 110


class OtherWorkers:
    """What other workers served, as a test says; ``mine`` is what they were told."""

    def __init__(self) -> None:
        self.theirs: Counter[str] = Counter()
        self.mine: Counter[str] = Counter()

    def served(self, tenant: str, tokens: int) -> None:
        self.mine[tenant] += tokens

    def others(self, tenant: str) -> int:
        return self.theirs[tenant]


def test_what_other_workers_serve_counts_while_a_tenant_waits() -> None:
    others = OtherWorkers()
    desk = Desk(FairQueue(peers=others))
    others.theirs["a"] = 10_000  # before it waited here: nobody here is owed for it
    for _ in range(30):
        desk.ask("a")
        desk.ask("b")
    assert [desk.serve().tenant for _ in range(4)] == ["a", "b", "a", "b"]
    others.theirs["a"] += 100
    desk.fair.count_peers()
    assert [desk.serve().tenant for _ in range(11)].count("b") >= 10
    assert others.mine == desk.served


def test_idle_flows_are_forgotten_and_those_at_work_are_not() -> None:
    counters: VirtualCounters[VirtualCounter] = VirtualCounters(VirtualCounter, 8)
    busy = counters.flow("busy")
    busy.running = 1
    waits = counters.flow("waits")
    counters.join(waits, 1)
    for i in range(100):
        counters.flow(str(i))
    assert len(counters) <= 8
    assert counters.find("busy") is busy
    assert counters.find("waits") is waits


class Laws(RuleBasedStateMachine):
    """Requests wait, begin, are refused, end and are settled, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.others = OtherWorkers()
        self.fair = FairQueue(lambda tenant: 1.0 + TENANTS.index(tenant), self.others)
        self.waiting: dict[int, Request] = {}
        self.open: list[tuple[Request, object]] = []
        self.tickets = 0
        self.true: Counter[str] = Counter()
        self.floors: dict[str, float] = {}
        self.served = 0.0

    @rule(tenant=st.sampled_from(TENANTS), adapter=st.sampled_from(["", "x"]), tokens=st.integers(0, 50))
    def arrive(self, tenant: str, adapter: str, tokens: int) -> None:
        self.tickets += 1
        request = Request("m", tenant=tenant, adapter=adapter, prompt_tokens=tokens, ticket=self.tickets)
        self.fair.add(request, returned=False)
        self.waiting[request.ticket] = request

    @precondition(lambda self: self.waiting)
    @rule()
    def begin_the_first(self) -> None:
        request = next(self.fair.walk()).request
        self._begin(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def begin_any(self, data: st.DataObject) -> None:
        self._begin(self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))])

    def _begin(self, request: Request) -> None:
        self.fair.remove(request)
        del self.waiting[request.ticket]
        self.open.append((request, self.fair.charge(request)))
        self.true[request.tenant] += cost(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), back=st.booleans())
    def end(self, data: st.DataObject, back: bool) -> None:
        request, charge = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        tokens = 0 if back else data.draw(st.integers(0, 100))
        self.fair.ended(charge)  # type: ignore[arg-type]
        self.fair.settle(charge, tokens)  # type: ignore[arg-type]
        self.true[request.tenant] += tokens - cost(request)
        if back:
            self.fair.add(request, returned=True)
            self.waiting[request.ticket] = request

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.integers(0, 100))
    def others_serve(self, tenant: str, tokens: int) -> None:
        self.others.theirs[tenant] += tokens
        self.fair.count_peers()

    @invariant()
    def everyone_waits_once_and_flows_keep_their_order(self) -> None:
        order = [turn.request for turn in self.fair.walk()]
        assert sorted(request.ticket for request in order) == sorted(self.waiting)
        assert len(self.fair) == len(self.waiting)
        assert self.fair.tokens == sum(cost(request) for request in self.waiting.values())
        flows: dict[tuple[str, str], int] = {}
        for request in order:
            flow = (request.tenant, request.adapter)
            assert flows.get(flow, 0) < request.ticket
            flows[flow] = request.ticket

    @invariant()
    def tags_grow(self) -> None:
        tags = [turn.tag for turn in self.fair.walk()]
        assert tags == sorted(tags)

    @invariant()
    def tokens_are_conserved(self) -> None:
        assert +self.others.mine == +self.true

    @invariant()
    def counters_never_run_back_behind_where_they_were_lifted(self) -> None:
        tenants = self.fair._tenants
        assert tenants._served >= self.served
        self.served = tenants._served
        for name in TENANTS:
            if (tenant := tenants.find(name)) is not None:
                assert tenant.counter >= tenant.floor >= self.floors.get(name, 0.0)
                self.floors[name] = tenant.floor
                assert tenant.running == sum(request.tenant == name for request, _ in self.open)


TestLaws = Laws.TestCase


@pytest.mark.parametrize("count", [2, 5])
def test_a_closed_loop_with_wrong_estimates_is_fair_in_truth(count: int) -> None:
    """Each tenant keeps a few requests going; all are charged 100 and cost from 10 to 90."""
    fair = FairQueue()
    rng = random.Random(count)  # noqa: S311
    tickets = 0
    waiting: dict[int, Request] = {}
    running: list[tuple[Request, object]] = []
    true: Counter[str] = Counter()

    def ask(tenant: str) -> None:
        nonlocal tickets
        tickets += 1
        request = Request("m", tenant=tenant, prompt_tokens=100, ticket=tickets)
        fair.add(request, returned=False)
        waiting[tickets] = request

    for i in range(count):
        for _ in range(6):
            ask(str(i))
    for _ in range(2000):
        while len(running) < 4:
            request = next(fair.walk()).request
            fair.remove(request)
            running.append((request, fair.charge(request)))
        request, charge = running.pop(rng.randrange(len(running)))
        tokens = 10 + 80 * int(request.tenant) // (count - 1)
        fair.ended(charge)  # type: ignore[arg-type]
        fair.settle(charge, tokens)  # type: ignore[arg-type]
        true[request.tenant] += tokens
        ask(request.tenant)
    assert jain([true[str(i)] for i in range(count)]) >= 0.99


COUNT = st.integers(0, 50)


@given(COUNT, COUNT, COUNT, COUNT, st.booleans())
def test_of_two_workers_in_which_somebody_waits_one_takes_the_next_slot(
    running: int, waiting: int, theirs: int, waiting_there: int, was_last: bool
) -> None:
    here = has_fair_share(running, waiting + 1, theirs, waiting_there + 1, was_last=was_last)
    there = has_fair_share(theirs, waiting_there + 1, running, waiting + 1, was_last=not was_last)
    assert not (here and there)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_slots_go_where_requests_wait(slots: int) -> None:
    """One worker has all of them, and each falls free in turn; a client that was served asks again."""
    running, waiting, last = [slots, 0], [2, 10], 0
    served: Counter[int] = Counter()
    for turn in range(30 * slots):
        ends = turn % 2 if all(running) else 0 if running[0] else 1
        running[ends] -= 1
        waiting[ends] += 1
        part = (running[ends], waiting[ends], running[1 - ends], waiting[1 - ends])
        takes = 1 - ends if has_fair_share(*part, was_last=last == ends) else ends
        running[takes] += 1
        waiting[takes] -= 1
        last = takes
        served[takes] += 1
    # Its part, or at least what goes in turns.
    assert served[1] >= 0.45 * served.total()


def test_who_waits_alone_leaves_nothing() -> None:
    assert not has_fair_share(2, 3, 1, 0, was_last=True)
