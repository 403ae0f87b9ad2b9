"""Fairness: tokens follow weights, and an idle tenant earns a bounded credit."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.admission.fairness import PASSED_OVER, FairQueue, cost
from policy.admission.indexed_heap import IndexedHeap
from policy.admission.virtual_counters import CREDIT, VirtualCounter, VirtualCounters
from policy.request import Request

TENANTS = ("a", "b", "c")


class Server:
    """Serves requests one at a time in the fair order."""

    def __init__(self, fair: FairQueue) -> None:
        self.fair = fair
        self.tickets = 0
        self.served: Counter[str] = Counter()
        self.by_adapter: Counter[tuple[str, str]] = Counter()

    def arrive(self, tenant: str, tokens: int = 10, adapter: str = "") -> Request:
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


@pytest.mark.slow
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5), st.randoms())
def test_weights_are_respected(weights: list[float], rng: random.Random) -> None:
    share = {str(i): weight for i, weight in enumerate(weights)}
    server = Server(FairQueue(share.__getitem__))
    for _ in range(100):
        for tenant in share:
            server.arrive(tenant, rng.randint(1, 100))
    for _ in range(100):
        server.serve()
    # While all are backlogged, no two differ by more than the largest request of each.
    normal = [server.served[tenant] / weight for tenant, weight in share.items()]
    assert max(normal) - min(normal) <= 2 * 100 / min(weights)


def test_adapters_share_within_their_tenant() -> None:
    server = Server(FairQueue())
    for _ in range(100):
        server.arrive("a", adapter="popular")
        server.arrive("b", adapter="")
    for _ in range(40):
        server.arrive("a", adapter="rare")
    for _ in range(80):
        server.serve()
    assert server.served["a"] == server.served["b"] == 400
    assert server.by_adapter["a", "popular"] == server.by_adapter["a", "rare"] == 200


@pytest.mark.parametrize(("idle_for", "ahead"), [(4, 4), (1000, CREDIT // 1000)])
def test_an_idle_tenant_goes_first_for_what_it_left_to_others_within_its_credit(
    idle_for: int, ahead: int
) -> None:
    server = Server(FairQueue())
    server.arrive("back", int(CREDIT))
    server.serve()
    for _ in range(8 + idle_for):
        server.arrive("steady", 1000)
        server.serve()
    for _ in range(30):
        server.arrive("steady", 1000)
        server.arrive("back", 1000)
    turns = [server.serve().tenant for _ in range(30)]
    assert turns.count("back") - turns.count("steady") == pytest.approx(ahead, abs=2)


def test_tags_are_the_weighted_tokens_served_before() -> None:
    server = Server(FairQueue(lambda tenant: 2.0 if tenant == "a" else 1.0))
    for _ in range(3):
        server.arrive("a", 10)
        server.arrive("b", 10)
    first = next(server.fair.walk())
    turns = [(turn.request.tenant, turn.tag - first.tag) for turn in server.fair.walk()]
    assert turns == [("a", 0), ("b", 0), ("a", 5), ("b", 10), ("a", 10), ("b", 20)]


def test_the_victim_is_of_the_longest_backlog() -> None:
    server = Server(FairQueue())
    server.arrive("long")
    youngest = server.arrive("long")
    server.arrive("short")
    newcomer = Request("m", tenant="short", prompt_tokens=5)
    assert server.fair.victim(newcomer) is youngest
    assert server.fair.victim(Request("m", tenant="long", prompt_tokens=5)) is None
    assert server.fair.victim(Request("m", tenant="short", prompt_tokens=50)) is None
    assert server.fair.victim(None) is youngest


def test_ahead_counts_the_share_of_the_backlog() -> None:
    server = Server(FairQueue())
    assert server.fair.ahead(Request("m", tenant="a")) == 0
    for _ in range(10):
        server.arrive("a", 10)
    server.arrive("b", 10)
    assert server.fair.ahead(Request("m", tenant="b")) == 20
    assert server.fair.ahead(Request("m", tenant="c")) == 0
    assert server.fair.ahead(Request("m", tenant="a")) == 110


class OtherWorkers:
    """What other workers served; ``mine`` is what this worker reported."""

    def __init__(self) -> None:
        self.theirs: Counter[str] = Counter()
        self.mine: Counter[str] = Counter()

    def served(self, tenant: str, tokens: int) -> None:
        self.mine[tenant] += tokens

    def others(self, tenant: str) -> int:
        return self.theirs[tenant]


def test_tokens_served_by_other_workers_count_while_a_tenant_waits() -> None:
    others = OtherWorkers()
    server = Server(FairQueue(peers=others))
    others.theirs["a"] = 10_000  # before it waited here: does not count
    for _ in range(30):
        server.arrive("a")
        server.arrive("b")
    assert [server.serve().tenant for _ in range(4)] == ["a", "b", "a", "b"]
    others.theirs["a"] += 100
    server.fair.count_peers()
    assert [server.serve().tenant for _ in range(11)].count("b") >= 10
    assert others.mine == server.served


def test_peers_are_counted_without_ranking_the_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    others = OtherWorkers()
    server = Server(FairQueue(peers=others))
    for number in range(10):
        server.arrive(str(number))
        others.theirs[str(number)] = 100 * number
    ranked = Mock()
    with monkeypatch.context() as patch:
        patch.setattr(IndexedHeap, "__iter__", ranked)
        server.fair.count_peers()
    assert not ranked.called
    assert [each.request.tenant for each in server.fair.walk()] == [str(number) for number in range(10)]


def test_only_idle_flows_are_forgotten() -> None:
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


class VisitedFlows(dict[str, VirtualCounter]):
    """Counts how many flows were looked at in turn."""

    visits = 0

    def values(self) -> Any:
        self.visits += len(self)
        return super().values()


@pytest.mark.parametrize("busy", [True, False], ids=["all run", "all are idle"])
def test_idle_flows_are_looked_for_in_constant_time_per_new_flow(*, busy: bool) -> None:
    counters: VirtualCounters[VirtualCounter] = VirtualCounters(VirtualCounter, 8)
    flows = counters._flows = VisitedFlows()
    for i in range(1000):
        counters.flow(str(i)).running = busy
    assert flows.visits <= 2 * 1000
    assert len(counters) == 1000 if busy else len(counters) <= 8
    for flow in flows.copy().values():
        flow.running = 0
    for i in range(1000, 2100):
        counters.flow(str(i))
    assert len(counters) <= 8, "the burst is forgotten"


STEPS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=120)


@given(STEPS, st.integers(1, 12))
def test_where_half_are_idle_the_same_are_forgotten_as_if_each_new_one_looked(
    steps: list[tuple[int, bool]], most: int
) -> None:
    both = VirtualCounters(VirtualCounter, most), VirtualCounters(VirtualCounter, most)
    running: set[int] = set()
    for number, begins in steps:
        both[1]._full = most  # it looks for idle flows at each new one beyond them
        if begins and len(running | {number}) <= most // 2:
            running.add(number)
            for counters in both:
                counters.begin(str(number), number)
        else:
            for counters in both:
                counters.flow(str(number))
        assert both[0]._flows.keys() == both[1]._flows.keys()


@given(STEPS, st.integers(1, 12))
def test_flows_that_run_are_kept_and_bound_how_many_others_are(
    steps: list[tuple[int, bool]], most: int
) -> None:
    counters: VirtualCounters[VirtualCounter] = VirtualCounters(VirtualCounter, most)
    running: set[str] = set()
    at_once = 0
    for number, begins in steps:
        counters.flow(str(number)).running = begins
        (running.add if begins else running.discard)(str(number))
        at_once = max(at_once, len(running))
        assert all(counters.find(name) is not None for name in running)
        assert len(counters) <= max(most, 2 * (most // 2 + at_once))


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
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        first = next(self.fair.walk()).request.ticket
        request = self.waiting[data.draw(st.sampled_from([first, *sorted(self.waiting)]))]
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
    def each_request_waits_once_and_flows_keep_their_order(self) -> None:
        turns = list(self.fair.walk())
        assert sorted(turn.request.ticket for turn in turns) == sorted(self.waiting)
        assert len(self.fair) == len(self.waiting)
        assert self.fair.tokens == sum(cost(request) for request in self.waiting.values())
        flows: dict[tuple[str, str], int] = {}
        for request in (turn.request for turn in turns):
            flow = (request.tenant, request.adapter)
            assert flows.get(flow, 0) < request.ticket
            flows[flow] = request.ticket
        tags = [turn.tag for turn in turns]
        assert tags == sorted(tags)
        assert +self.others.mine == +self.true

    @invariant()
    def counters_never_fall_below_their_floor_by_more_than_the_credit(self) -> None:
        tenants = self.fair._tenants
        assert tenants._served >= self.served
        self.served = tenants._served
        for name in TENANTS:
            if (tenant := tenants.find(name)) is not None:
                assert tenant.counter + CREDIT >= tenant.floor >= self.floors.get(name, 0.0)
                self.floors[name] = tenant.floor
                assert tenant.running == sum(request.tenant == name for request, _ in self.open)


TestLaws = Laws.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5])
def test_a_closed_loop_with_wrong_estimates_is_fair(count: int) -> None:
    """Each tenant keeps six requests open; all are charged 100 and cost from 10 to 90."""
    fair = FairQueue()
    rng = random.Random(count)  # noqa: S311
    tickets = 0
    waiting: dict[int, Request] = {}
    running: list[tuple[Request, object]] = []
    true: Counter[str] = Counter()

    def arrive(tenant: str) -> None:
        nonlocal tickets
        tickets += 1
        request = Request("m", tenant=tenant, prompt_tokens=100, ticket=tickets)
        fair.add(request, returned=False)
        waiting[tickets] = request

    for i in range(count):
        for _ in range(6):
            arrive(str(i))
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
        arrive(request.tenant)
    assert jain([true[str(i)] for i in range(count)]) >= 0.99


@given(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 5), st.integers(1, 50)), max_size=40),
    st.integers(0, 20),
    st.sets(st.integers(0, 5)),
)
def test_of_few_and_of_many_adapters_that_are_left_out_the_same_walk_remains(
    arrivals: list[tuple[str, int, int]], served: int, out: set[int]
) -> None:
    server = Server(FairQueue({"a": 1.0, "b": 2.0, "c": 0.5}.__getitem__))
    for tenant, adapter, tokens in arrivals:
        server.arrive(tenant, tokens, str(adapter))
    for _ in range(min(served, len(arrivals) // 2)):
        server.serve()
    few = {str(number) for number in out}
    many = few | {f"other-{number}" for number in range(PASSED_OVER)}
    one_by_one = list(server.fair.walk(few))
    assert list(server.fair.walk(many)) == one_by_one
    everything = [turn.request for turn in server.fair.walk()]
    assert {r.ticket for r, _ in one_by_one} == {r.ticket for r in everything if r.adapter not in few}
    # Those of a tenant stay in order.
    for tenant in TENANTS:
        left = [r for r, _ in one_by_one if r.tenant == tenant]
        assert left == [r for r in everything if r.tenant == tenant and r.adapter not in few]


def test_requests_that_are_left_out_put_off_no_others_of_their_tenant() -> None:
    server = Server(FairQueue())
    for number in range(PASSED_OVER + 1):
        server.arrive("a", 100, f"adapter-{number}")
    own = server.arrive("a", 100)
    for _ in range(3):
        server.arrive("b", 100)
    out = {f"adapter-{number}" for number in range(PASSED_OVER + 1)}
    assert [turn.request for turn in server.fair.walk(out)][:2].count(own) == 1
