"""The router: the terms of a cost estimate, and the invariants of a choice."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.engine.performance_model import BatchLimits, EngineModel, Timing
from policy.request import Request
from policy.routing.cache_affinity import ShareSums
from policy.routing.cost import SECOND_PREFILL, Candidate, CostEstimate
from policy.routing.replica_state import ReplicaState
from policy.routing.router import (
    ABSENT_S,
    AWAY,
    CACHED,
    HOME,
    MOST_QUOTES,
    NO_ROOM,
    OVERDUE_S,
    RESIDENT,
    SOONEST,
    TOO_LATE,
    PickResult,
    Router,
)
from policy.routing.settings import RoutingSettings
from policy.wire.load_stream import CachedPrefix

MODEL = EngineModel(o=1e-3, w=4e-3, c=5e-5, g=1e-7, r=1e-5)
LIMITS = BatchLimits(max_num_batched_tokens=512, max_num_seqs=16, kv_tokens=20_000)
TIMING = Timing(limits=LIMITS, model=MODEL)
CHAIN = tuple(range(100, 116, 2))
DEPTHS = tuple(range(128, 1025, 128))


def fleet(count: int, timing: Timing | None = TIMING) -> list[Candidate]:
    return [Candidate(f"r{i}", key=i + 1, timing=timing) for i in range(count)]


def prompt(chain: tuple[int, ...] = CHAIN, tokens: int = 1040, **more: object) -> Request:
    return Request("m", prompt_tokens=tokens, prefix=chain, depths=DEPTHS[: len(chain)], **more)  # type: ignore[arg-type]


def short(**more: object) -> Request:
    return Request("m", prompt_tokens=20, output_tokens=20, **more)  # type: ignore[arg-type]


def send(router: Router, request: Request, candidates: list[Candidate], at: float = 0.0) -> PickResult:
    decision = router.choose(request, candidates, at, 0.5)
    candidate = best(decision).candidate
    router.began(request, candidate, at)
    candidate.begun += 1
    return decision


def best(decision: PickResult) -> CostEstimate:
    assert decision.chosen is not None
    return decision.chosen


def quoted(
    request: Request, candidate: Candidate, at: float = 0.0, router: Router | None = None
) -> CostEstimate:
    """The cost of the only candidate."""
    return best((router or Router()).choose(request, [candidate], at, 0.0))


def quoted_at(decision: PickResult, candidate: Candidate) -> CostEstimate:
    return next(quote for quote in decision.quotes if quote.candidate is candidate)


def chosen(decision: PickResult) -> str:
    return best(decision).candidate.id


def test_an_idle_replica_costs_its_own_prefill_alone() -> None:
    quote = quoted(short(), *fleet(1))
    assert (quote.wait, quote.adapter, quote.pressure) == (0.0, 0.0, 0.0)
    assert quote.prefill == pytest.approx(MODEL.step_time(20, 0, 1), rel=0.02)


@pytest.mark.parametrize("pending", [100, 700, 5000])
def test_wait_and_prefill_follow_the_engine_model(pending: int) -> None:
    """The closed form is within a step and 5 % of the model's loop over the chunks."""
    [candidate] = fleet(1)
    candidate.in_flight, candidate.pending_tokens = 8, pending
    candidate.turned_at = 1.0
    quote = quoted(short(), candidate, 1.0)
    loop = MODEL.prefill_s(pending + 20, 512, 0.0, 8)
    assert quote.total == pytest.approx(loop, rel=0.05, abs=MODEL.step_time(512, 0, 8))


def test_a_full_engine_adds_a_wait_and_a_full_kv_cache_a_pressure() -> None:
    [candidate] = fleet(1)
    waits = []
    for in_flight in (15, 16, 20):
        candidate.in_flight = in_flight
        waits.append(quoted(short(), candidate).wait)
    assert waits[0] < waits[1] < waits[2]
    candidate.in_flight, candidate.kv_used = 4, 0.99
    assert quoted(prompt(), candidate).pressure > 0.0


def test_cached_tokens_take_kv_when_they_run() -> None:
    router, [home] = Router(), fleet(1)
    send(router, prompt(), [home])
    home.in_flight = 4
    pressures = []
    for home.kv_used in (0.94, 0.96):  # 1,200 and 800 of 20,000 tokens are free
        quote = quoted(prompt(output_tokens=100), home, router=router)
        assert quote.uncached < 100
        pressures.append(quote.pressure)
    assert pressures[0] == 0.0 < pressures[1]


def test_a_cached_prefix_stays_and_a_new_one_goes_elsewhere() -> None:
    router, candidates = Router(), fleet(3)
    first = send(router, prompt(), candidates)
    assert first.reason == HOME
    again = send(router, prompt(), candidates)
    assert chosen(again) == chosen(first) and again.reason == CACHED
    assert best(again).uncached == 1040 - 1024
    other = send(router, prompt(tuple(value + 1000 for value in CHAIN)), candidates)
    assert chosen(other) != chosen(first)


def test_a_hit_in_host_memory_costs_its_copy() -> None:
    router, candidates = Router(), fleet(3)
    near, far, _ = candidates
    first = CachedPrefix(CHAIN[0], 24)
    router.cached([first, CachedPrefix(CHAIN[-1], 1024)], [], near.key, 0.0, reset=True)
    router.cached([first, CachedPrefix(CHAIN[-1], 24, 1000)], [], far.key, 0.0, reset=True)
    decision = router.choose(prompt(), candidates, 0.0, 0.0)
    device, host, none = (quoted_at(decision, each) for each in candidates)
    assert device.total < host.total < none.total
    assert host.total - device.total == pytest.approx(MODEL.copy_s(1000))
    assert host.modelled - device.modelled == pytest.approx(MODEL.copy_s(1000))
    assert (host.cached, host.burden) == (1024, device.burden)
    router.cached([CachedPrefix(CHAIN[-1], 1024)], [], far.key, 0.0, reset=False)
    decision = router.choose(prompt(), candidates, 0.0, 0.0)
    assert quoted_at(decision, far).total == quoted_at(decision, near).total


def test_away_from_home_when_the_wait_there_is_longer() -> None:
    router, candidates = Router(), fleet(2)
    home = chosen(send(router, prompt(), candidates))
    for candidate in candidates:
        if candidate.id == home:
            candidate.in_flight, candidate.pending_tokens = 8, 8000
    decision = router.choose(prompt(), candidates, 0.0, 0.5)
    assert chosen(decision) != home and decision.reason == AWAY


def test_new_hashes_are_returned_once_and_learned_by_other_routers() -> None:
    here, there = Router(), Router()
    candidates = fleet(2)
    home = best(here.choose(prompt(), candidates, 0.0, 0.5)).candidate
    new_hashes = here.began(prompt(), home, 0.0)
    assert new_hashes == CHAIN
    assert here.began(prompt(), home, 0.0) == ()
    there.learned(new_hashes, home.key, 0.0)
    assert best(there.choose(prompt(), candidates, 0.0, 0.9)).candidate is home


def test_a_removed_replica_has_no_cached_prefix() -> None:
    router, candidates = Router(), fleet(2)
    router.forget(best(send(router, prompt(), candidates)).candidate.key)
    for quote in router.choose(prompt(), candidates, 0.0, 0.0).quotes:
        assert quote.uncached == 1040


def test_adapters_stay_where_they_are_loaded() -> None:
    router, candidates = Router(RoutingSettings(slots=2)), fleet(2)
    request = short(adapter="a", adapter_key=7)
    first = router.choose(request, candidates, 0.0, 0.5)
    home = best(first).candidate
    assert best(first).adapter > 0.0
    assert router.began(request, home, 0.0) == (7,)
    again = router.choose(request, candidates, 0.0, 0.5)
    assert again.reason == RESIDENT and chosen(again) == chosen(first)
    assert best(again).adapter == 0.0
    other = Router(RoutingSettings(slots=2))
    other.learned((7,), home.key, 0.0)
    assert chosen(other.choose(request, candidates, 0.0, 0.5)) == chosen(first)


def test_the_load_time_of_an_adapter_is_measured() -> None:
    router, candidates = Router(), fleet(1)
    for key in range(1, 121, 2):
        request = short(adapter_key=key)
        quote = best(send(router, request, candidates))
        router.timed(request, quote, 2.0, 0.0)
    assert quote.adapter == pytest.approx(2.0, rel=0.1)


def test_an_adapter_load_in_progress_delays_other_requests() -> None:
    """Until its first token, or for the predicted time where this worker does not see it."""
    router, candidates = Router(), fleet(2)
    loads = best(send(router, short(adapter_key=7), candidates))
    assert loads.loads == 1
    busy, idle = sorted(router.choose(short(), candidates, 0.0, 0.5).quotes, key=lambda quote: -quote.wait)
    assert busy.candidate is loads.candidate
    assert (busy.loads, idle.loads, idle.wait) == (1, 0, 0.0)
    assert busy.wait == pytest.approx(loads.adapter)
    later = router.choose(short(), candidates, 2.0 * loads.total, 0.5)
    assert max(quote.wait for quote in later.quotes) == 0.0

    again = best(send(router, short(adapter_key=9), candidates, at=10.0))
    router.timed(short(adapter_key=9), again, 0.01, 10.01)
    assert max(quote.wait for quote in router.choose(short(), candidates, 10.01, 0.5).quotes) == 0.0


def test_the_ttft_of_a_request_behind_a_load_does_not_change_prefill_predictions() -> None:
    router, candidates = Router(), fleet(1)
    before = router.choose(prompt(), candidates, 0.0, 0.5).quotes[0].total
    for i in range(40):
        at = 10.0 * i
        router.began(short(adapter_key=2 * i + 1), candidates[0], at)
        behind = best(router.choose(short(), candidates, at, 0.5))
        assert behind.loads == 1
        router.timed(short(), behind, 1.0, at)
    assert router.choose(prompt(), candidates, 1000.0, 0.5).quotes[0].total == pytest.approx(before)


def test_caches_fill_evenly_when_loads_are_uneven() -> None:
    """A replica with much less load does not get all new prefixes, which its cache might not hold."""
    router, candidates = Router(), fleet(3, timing=None)
    router.choose(short(), candidates, 0.0, 0.5)
    for candidate in candidates[:2]:
        candidate.begun = 500
    homes = [
        chosen(send(router, prompt(tuple(value + 1000 * number for value in CHAIN)), candidates))
        for number in range(30)
    ]
    assert 10 <= homes.count("r2") <= 13


def test_a_session_stays_within_a_small_margin() -> None:
    router, candidates = Router(), fleet(4)
    first = chosen(send(router, short(session=9), candidates))
    for draw in (0.0, 0.3, 0.6, 0.9):
        assert chosen(router.choose(short(session=9), candidates, 0.0, draw)) == first
    for candidate in candidates:
        if candidate.id == first:
            candidate.in_flight, candidate.pending_tokens = 8, 8000
    assert chosen(router.choose(short(session=9), candidates, 0.0, 0.0)) != first


def test_ties_are_decided_by_the_draw() -> None:
    candidates = fleet(4)
    picks = {chosen(Router().choose(short(), candidates, 0.0, draw)) for draw in (0.0, 0.3, 0.6, 0.9)}
    assert len(picks) == 4
    assert Router().choose(short(), candidates, 0.0, 0.0).reason == SOONEST


def test_no_replica_is_chosen_without_room_or_in_time() -> None:
    [candidate] = fleet(1)
    candidate.bound = candidate.in_flight = 2
    decision = Router().choose(short(), [candidate], 0.0, 0.0)
    assert (decision.chosen, decision.quotes, decision.reason) == (None, (), NO_ROOM)
    candidate.bound, candidate.pending_tokens = 0, 5000
    late = Router(RoutingSettings(start_s=0.1)).choose(short(), [candidate], 0.0, 0.0)
    assert late.chosen is None and late.reason == TOO_LATE and late.quotes
    assert Router(RoutingSettings(start_s=10.0)).choose(short(), [candidate], 0.0, 0.0).chosen is not None


def test_an_idle_replica_takes_any_prompt() -> None:
    router = Router(RoutingSettings(start_s=0.001, itl_s=0.001))
    assert router.choose(prompt(tokens=100_000), fleet(1), 0.0, 0.0).chosen is not None


# A model whose step time depends strongly on the running requests.
STEEP_MODEL = msgspec.structs.replace(MODEL, r=1e-3)
STEEP = Timing(limits=LIMITS, model=STEEP_MODEL)


def admitted(router: Router) -> int:
    """How many requests such a replica gets at once."""
    [candidate] = fleet(1, STEEP)
    while candidate.in_flight < 40 and router.choose(short(), [candidate], 0.0, 0.0).chosen is not None:
        candidate.in_flight += 1
    return candidate.in_flight


def test_concurrency_follows_the_measured_token_gaps() -> None:
    router = Router(RoutingSettings(itl_s=STEEP_MODEL.step_time(16, 0, 16)))
    [candidate] = fleet(1, STEEP)
    assert 15 <= admitted(router) <= 17
    for _ in range(200):
        send(router, short(), [candidate])
        router.paced(candidate, 2.0 * STEEP_MODEL.step_time(1, 0, 1))
    assert 4 <= admitted(router) <= 7
    for _ in range(200):
        router.paced(candidate, STEEP_MODEL.step_time(1, 0, 1))
    assert 15 <= admitted(router) <= 17


def test_late_first_tokens_do_not_change_the_concurrency() -> None:
    """After an overload replicas are empty and must take the requests that wait in the gateway."""
    router = Router(RoutingSettings(itl_s=STEEP_MODEL.step_time(16, 0, 16)))
    [candidate] = fleet(1, STEEP)
    for _ in range(200):
        router.timed(short(), best(send(router, short(), [candidate])), 8.0, 0.0)
        router.paced(candidate, STEEP_MODEL.step_time(1, 0, 1))
    assert 15 <= admitted(router) <= 17


def test_the_itl_slo_delays_a_request_at_most_for_the_duration_of_its_answer() -> None:
    [candidate] = fleet(1)
    itl_s = MODEL.step_time(8, 0, 8)
    router = Router(RoutingSettings(itl_s=itl_s))
    candidate.in_flight = 15
    waits = Request("m", prompt_tokens=10, output_tokens=100, arrived=5.0)
    assert router.choose(waits, [candidate], 5.0 + 99 * itl_s, 0.0).chosen is None
    assert router.choose(waits, [candidate], 5.0 + 101 * itl_s, 0.0).chosen is not None


def test_an_itl_slo_that_a_single_request_misses_is_ignored() -> None:
    [candidate] = fleet(1)
    router = Router(RoutingSettings(itl_s=MODEL.step_time(1, 0, 1) * 0.9))
    candidate.in_flight = 15
    assert router.choose(short(), [candidate], 0.0, 0.0).chosen is not None


def test_a_replica_that_cannot_meet_the_itl_slo_gets_one_request() -> None:
    """A throttled replica, or one of another shape, does not bypass the SLO."""
    quick, slow = fleet(2)
    slow.timing = msgspec.structs.replace(TIMING, model=MODEL.faster(1 / 3))
    router = Router(RoutingSettings(itl_s=MODEL.step_time(8, 0, 8)))
    begun = {quick.id: 0, slow.id: 0}
    while (chosen := router.choose(short(), [quick, slow], 0.0, 0.0).chosen) is not None:
        router.began(short(), chosen.candidate, 0.0)
        chosen.candidate.in_flight += 1
        begun[chosen.candidate.id] += 1
        assert sum(begun.values()) < 40
    assert begun[slow.id] == 1
    assert 7 <= begun[quick.id] <= 9
    # Without the quick replica the SLO is ignored.
    assert router.choose(short(), [slow], 0.0, 0.0).chosen is not None


def test_many_candidates_are_reduced_to_a_shortlist() -> None:
    router, candidates = Router(), fleet(64)
    for candidate in candidates:
        candidate.in_flight = 5
    home = candidates[40]
    router.choose(prompt(), candidates, 0.0, 0.5)
    router.began(prompt(), home, 0.0)
    candidates[17].in_flight = 0
    decision = router.choose(prompt(), candidates, 0.0, 0.5)
    quoted = {quote.candidate.id for quote in decision.quotes}
    assert len(quoted) <= MOST_QUOTES and {"r40", "r17"} <= quoted
    assert chosen(decision) == "r40"


class VisitedStates(dict[int, ReplicaState]):
    """Counts how many states were looked at in turn."""

    visits = 0

    def values(self) -> Any:
        for state in super().values():
            self.visits += 1
            yield state


@pytest.mark.parametrize("count", [10, 100])
def test_each_state_is_looked_at_a_few_times_however_many_are_new_or_have_the_prefix(count: int) -> None:
    router, candidates = Router(), fleet(count)
    states = router._sites = VisitedStates()
    router.choose(prompt(), candidates, 100.0, 0.5)  # all are new
    router.choose(prompt(), candidates, 200.0, 0.5)  # all are back
    assert states.visits <= 2 * count
    for candidate in candidates[:-1]:
        router.began(prompt(), candidate, 200.0)
    states.visits = 0
    router.began(prompt(), candidates[-1], 200.0)  # all others have the prefix
    assert states.visits <= 2 * count


class PlainRouter(Router):
    """Sums up anew all that are present for each replica that is leveled."""

    def _level(self, site: ReplicaState, at: float, present: ShareSums) -> None:
        others = [each for each in self._sites.values() if each is not site]
        shares = [each.share for each in others if at - each.seen_at < ABSENT_S]
        if weights := sum(share.weight for share in shares):
            part = site.share.weight / weights
            site.share.load = max(site.share.load, part * sum(share.load for share in shares))
            site.share.homes = max(site.share.homes, part * sum(share.homes for share in shares))


STEP = st.tuples(
    st.sampled_from([0.0, 0.5, 4.0, 5.0, 6.0]),  # seconds since the last one
    st.sets(st.integers(0, 6), min_size=1),  # the candidates
    st.integers(0, 3),  # of the prompts
    st.integers(0, 40),  # requests of other workers there
)


@pytest.mark.slow
@given(st.lists(STEP, max_size=40), st.integers(3, 9))
def test_replicas_that_come_back_are_leveled_as_if_each_looked_at_all_others(
    steps: list[tuple[float, set[int], int, int]], most: int
) -> None:
    kinds = (TIMING, Timing(limits=msgspec.structs.replace(LIMITS, max_num_seqs=40), model=MODEL))
    fleets = [[Candidate(f"r{i}", key=i + 1, timing=kinds[i % 2]) for i in range(7)] for _ in range(2)]
    routers = [Router(), PlainRouter()]
    at = 50.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("policy.routing.router.MAX_SITES", most)
        for wait_s, present, number, begun in steps:
            at += wait_s
            request = prompt(tuple(value + 100 * number for value in CHAIN))
            picks = []
            for router, replicas in zip(routers, fleets, strict=True):
                replicas[number].begun += begun
                pick = best(router.choose(request, [replicas[i] for i in sorted(present)], at, 0.5)).candidate
                router.began(request, pick, at)
                pick.begun += 1
                picks.append(pick.id)
            assert picks[0] == picks[1]
            shares, plain = ({key: site.share for key, site in router._sites.items()} for router in routers)
            assert shares.keys() == plain.keys()
            for key, share in shares.items():
                assert (share.load, share.homes) == (plain[key].load, plain[key].homes)


def serve(router: Router, candidates: list[Candidate], slow: dict[str, float], at: float) -> dict[str, int]:
    """400 short requests, one after the other; those in ``slow`` take that much longer."""
    rng = random.Random(5)  # noqa: S311 - a simulation
    sent = dict.fromkeys((candidate.id for candidate in candidates), 0)
    for i in range(400):
        now = at + 0.01 * i
        quote = best(router.choose(short(), candidates, now, rng.random()))
        candidate = quote.candidate
        router.began(short(), candidate, now)
        candidate.begun += 1
        sent[candidate.id] += 1
        router.timed(short(), quote, 0.02 * slow.get(candidate.id, 1.0) * rng.uniform(0.8, 1.25), now)
    return sent


def test_a_slow_replica_loses_its_share_and_gets_it_back() -> None:
    router, candidates = Router(), fleet(4)
    even = serve(router, candidates, {}, at=0.0)
    assert max(even.values()) <= 1.10 * 100
    slowed = serve(router, candidates, {"r2": 5.0}, at=10.0)
    assert slowed["r2"] < 50
    serve(router, candidates, {}, at=200.0)
    assert serve(router, candidates, {}, at=210.0)["r2"] > 80


def test_predictions_adapt_to_a_server_of_unknown_speed() -> None:
    """A server twice as slow as assumed, with 30 ms of network: predicted within a tenth."""
    router, [candidate] = Router(), fleet(1, timing=None)
    rng = random.Random(2)  # noqa: S311 - a simulation
    errors = []
    for i in range(400):
        request = Request("m", prompt_tokens=rng.choice((50, 4000)))
        quote = quoted(request, candidate, 0.1 * i, router)
        actual = 0.03 + 2.0 * quote.modelled
        errors.append(abs(quote.total - actual) / actual)
        router.began(request, candidate, 0.1 * i)
        router.timed(request, quote, actual, 0.1 * i)
    assert sorted(errors[200:])[100] < 0.1


loads = st.fixed_dictionaries(
    {
        "bound": st.integers(0, 8),
        "in_flight": st.integers(0, 40),
        "pending_tokens": st.integers(0, 20_000),
        "begun": st.integers(0, 1000),
        "kv_used": st.floats(0.0, 1.0),
    }
)


@pytest.mark.slow
@given(st.lists(loads, min_size=1, max_size=12), st.floats(0.0, 0.999), st.booleans(), st.booleans())
def test_the_choice_is_admissible(states: list[dict[str, int]], draw: float, timed: bool, long: bool) -> None:
    candidates = [
        Candidate(str(i), key=i + 1, timing=TIMING if timed else None, **state)  # type: ignore[arg-type]
        for i, state in enumerate(states)
    ]
    request = prompt() if long else short()
    decision = Router().choose(request, candidates, 0.0, draw)
    free = [c for c in candidates if not c.bound or c.in_flight < c.bound]
    assert (decision.chosen is None) == (not free)
    if decision.chosen is not None:
        assert decision.chosen.candidate in free
        assert decision.chosen in decision.quotes
    for quote in decision.quotes:
        assert all(part >= 0.0 and math.isfinite(part) for part in quote[1:5])


@given(loads, st.integers(0, 10), st.integers(0, 5000), st.floats(0.0, 0.5))
def test_more_load_lowers_no_cost(state: dict[str, float], requests: int, tokens: int, kv: float) -> None:
    less = Candidate("r", key=1, timing=TIMING, **{**state, "bound": 0})  # type: ignore[arg-type]
    more = replace(
        less,
        in_flight=less.in_flight + requests,
        pending_tokens=less.pending_tokens + tokens,
        kv_used=min(1.0, less.kv_used + kv),
    )
    first, second = (quoted(prompt(), candidate) for candidate in (less, more))
    # A running step is half over on average, one with prompts in it may have just begun.
    assert second.total >= 0.999 * first.total - 1e-9


def test_an_evicted_prefix_does_not_count_as_slowness() -> None:
    """The assumed cache capacity shrinks, and the replica is not assumed slower."""
    router, candidates = Router(), fleet(1, timing=None)
    whole = Router().choose(prompt(), candidates, 0.0, 0.5).quotes[0].total
    for i in range(150):
        router.timed(prompt(), best(send(router, prompt(), candidates, at=float(i))), whole, float(i))
        router.began(prompt((2 * i, 2 * i + 10_000)), candidates[0], float(i))
    last = best(router.choose(prompt(), candidates, 150.0, 0.5))
    assert last.uncached == 1040
    assert last.total == pytest.approx(whole, rel=0.1)


def test_a_request_is_expected_to_run_as_predicted_and_then_as_long_again_within_its_limit() -> None:
    router, (candidate,) = Router(), fleet(1)
    expected_s = router.service_s(short(), [candidate])
    assert router.remaining_s(short(), candidate, 0.25 * expected_s) == pytest.approx(0.75 * expected_s)
    assert router.remaining_s(short(), candidate, 5 * expected_s) == pytest.approx(5 * expected_s)
    limited = short(limit_tokens=40, long_tokens=40)
    longest_s = router.longest_s(limited, candidate)
    assert expected_s < longest_s < router.longest_s(short(long_tokens=60), candidate)
    assert router.remaining_s(limited, candidate, 0.9 * longest_s) == pytest.approx(0.1 * longest_s)
    # Beyond its limit it is slower than predicted, and was not forgotten.
    assert router.remaining_s(limited, candidate, 2 * longest_s) == min(2 * longest_s, OVERDUE_S)
    for _ in range(200):
        router.began(short(), candidate, 0.0)
        router.paced(candidate, 3.0 * longest_s / limited.limit_tokens)
    assert router.longest_s(limited, candidate) > 1.5 * longest_s


def test_a_returning_session_computes_only_what_is_new_since_its_last_prompt() -> None:
    router, candidates = Router(), fleet(1)
    send(router, prompt(CHAIN[:7], tokens=1000, session=9), candidates)
    grown = prompt(tokens=1040, session=9)  # hashed at 896 tokens, and now at 1024 too
    assert quoted(grown, candidates[0], 1.0, router).uncached == 40
    other = prompt((*CHAIN[:3], 998), tokens=1040, session=9)  # as after a compaction
    assert quoted(other, candidates[0], 1.0, router).uncached == 1040 - 384


def test_what_a_full_cache_would_lose_is_a_burden() -> None:
    router, candidates = Router(), fleet(1)
    for i in range(18):  # 18,000 of 20,000 tokens
        chain = tuple(range(10_000 * (i + 1), 10_000 * (i + 1) + 16, 2))
        send(router, prompt(chain, tokens=1000, session=i + 1), candidates, float(i))

    def burden(output: int) -> float:
        newcomer = prompt(tuple(range(30, 46, 2)), tokens=1000, session=100, output_tokens=output)
        return quoted(newcomer, candidates[0], 19.0, router).burden

    assert burden(1) == burden(1000) == 0.0
    # 500 tokens more than fit; the least recent sessions are taken to return with a probability of 0.3.
    assert burden(1500) == pytest.approx(0.3 * 500 * MODEL.step_time(512, 0, 8) / 512, rel=0.05)


def test_a_session_moves_only_for_more_than_a_second_prefill_and_its_price() -> None:
    router, candidates = Router(), fleet(2)
    turn = prompt(session=9)
    home = next(each for each in candidates if each.id == chosen(send(router, turn, candidates)))
    other = next(each for each in candidates if each is not home)
    decision = router.choose(turn, candidates, 1.0, 0.5)
    second_s = quoted_at(decision, other).prefill - quoted_at(decision, home).prefill
    assert quoted_at(decision, home).burden == 0.0
    assert quoted_at(decision, other).burden == pytest.approx(SECOND_PREFILL * second_s, rel=0.2)


def test_a_session_loses_its_own_tokens_by_waiting_the_likelier_the_older_they_are() -> None:
    router, [home] = Router(), fleet(1)
    turn = prompt(tokens=1000, session=9)
    assert not router.loss_s(turn, home, 2, 0.0)
    send(router, turn, [home])
    whole_s = quoted(prompt((2,), tokens=1000), *fleet(1)).prefill
    assert router.loss_s(turn, home, 1, 1.0) == 0.0
    assert router.loss_s(turn, home, 4, 1.0) == pytest.approx(0.75 * whole_s, rel=0.02)
    for i in range(10):  # half of what the cache holds
        send(router, prompt((20 + 2 * i,), tokens=1000), [home], 1.0)
    assert router.loss_s(turn, home, 1, 1.0) == pytest.approx(0.5 * whole_s, rel=0.02)
    send(router, turn, [Candidate("r1", key=2, timing=TIMING)], 2.0)
    assert router.loss_s(turn, home, 4, 2.0) == 0.0
