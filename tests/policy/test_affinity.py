"""Homes: who wins them, how even they are, and what that is worth in simulated fleets."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.bench.affinity_policy import CASES, Case, Outcome, run
from policy.affinity import Popularity, Recent, Share, Slots, balance_of, rendezvous

REPLICAS = [0x1111_2222_3333_4444 * i + 7 for i in range(1, 6)]


def winner(item: int, replicas: list[int]) -> int:
    return max(replicas, key=lambda replica: rendezvous(item, replica))


def test_homes_are_shared_out_by_weight() -> None:
    weights = dict(zip(REPLICAS[:3], (1.0, 1.0, 2.0), strict=True))
    wins = Counter(
        max(weights, key=lambda replica: rendezvous(item * 977, replica, weights[replica]))
        for item in range(4000)
    )
    assert wins[REPLICAS[2]] == pytest.approx(2000, rel=0.1)
    assert wins[REPLICAS[0]] == pytest.approx(1000, rel=0.1)


@given(st.integers(0, 2**64 - 1))
def test_a_replica_that_goes_moves_only_its_own(item: int) -> None:
    before = winner(item, REPLICAS)
    for gone in REPLICAS:
        after = winner(item, [replica for replica in REPLICAS if replica != gone])
        assert before in (after, gone)


def test_the_adapter_longest_unused_leaves() -> None:
    slots = Slots(2)
    assert slots.use(1) and slots.use(3)
    assert not slots.use(1)
    assert slots.next_out == 3
    assert slots.use(5)
    assert 3 not in slots and 1 in slots and 5 in slots


@given(st.lists(st.integers(0, 1000), max_size=300), st.integers(1, 50))
def test_counts_and_memories_are_bounded(keys: list[int], span: int) -> None:
    popular, recent = Popularity(span), Recent(2 * span)
    for key in keys:
        popular.add(key)
        recent.put(key, key + 1)
        assert len(popular) <= 2 * span and len(recent) <= 2 * span
        assert 0.0 < popular.share(key) <= 1.0
        assert recent.get(key) == key + 1


def shares(*loads: float) -> list[Share]:
    found = []
    for load in loads:
        share = Share()
        share.load = load
        found.append(share)
    return found


def test_a_share_within_chance_of_the_mean_costs_next_to_nothing() -> None:
    even = shares(104, 100, 98, 98)
    balance = balance_of(even)
    assert balance.share_price(even[0], leverage=1.0) < 0.05


def test_above_its_bound_a_home_is_dearer_than_a_cold_prefill() -> None:
    uneven = shares(500, 400, 400, 380)
    balance = balance_of(uneven)
    assert balance.share_price(uneven[0], leverage=1.0) > 2.0
    assert balance.share_price(uneven[0], leverage=0.01) < 1.0, "too little to be the cure"
    assert balance.share_price(uneven[3], leverage=1.0) < 0.0


def test_while_a_cure_is_under_way_no_other_is_begun() -> None:
    uneven = shares(500, 400, 400, 380)
    uneven[0].takers = [(uneven[3], 1.0)]
    assert balance_of(uneven).share_price(uneven[0], leverage=1.0) < 1.0
    uneven[1].load = uneven[2].load = 340.0
    uneven[3].load = 500.0
    assert balance_of(uneven).share_price(uneven[0], leverage=1.0) > 2.0, "who takes it has too much itself"


def test_a_new_home_costs_least_where_least_is() -> None:
    uneven = shares(100, 90, 120, 110)
    uneven[1].homes = 10.0
    balance = balance_of(uneven, worth=2.0)
    prices = [(share.due - balance.least) * balance.unit for share in uneven]
    assert min(prices) == prices[0] == 0.0 and prices[1] > 0.0


def test_a_slower_replica_is_due_less() -> None:
    uneven = shares(100, 100, 100, 40)
    uneven[3].weight = 0.2
    balance = balance_of(uneven)
    assert balance.share_price(uneven[3], leverage=1.0) > balance.share_price(uneven[0], leverage=1.0)


def test_old_requests_are_forgotten_by_halves() -> None:
    many = shares(3000, 1000, 1000, 1000)
    assert balance_of(many).load == 750.0
    assert many[0].load == 1500.0


# What it is for, in simulated fleets: the same runs as the tables of loadtests/bench/affinity_policy.py.


def outcomes(name: str, policy: str = "tidegate", seeds: int = 8) -> list[Outcome]:
    case = next(case for case in CASES if case.name == name)
    return [run(case, policy, seed) for seed in range(seeds)]


def mean(row: list[Outcome], what: str) -> float:
    return statistics.fmean(getattr(outcome, what) for outcome in row)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["32 clients", "open loop"])
@pytest.mark.parametrize(("law", "cold"), [("uniform", 33.0), ("Zipf", 34.5)])
def test_prefixes_are_computed_once_and_load_stays_even(loop: str, law: str, cold: float) -> None:
    row = outcomes(f"32 prefixes, {law}, {loop}")
    assert mean(row, "cold") <= cold
    assert mean(row, "load") <= 1.10


@pytest.mark.slow
@pytest.mark.parametrize("law", ["uniform", "Zipf"])
def test_eight_workers_come_close_to_one(law: str) -> None:
    many = outcomes(f"32 prefixes, {law}, 8 workers", seeds=4)
    one = outcomes(f"32 prefixes, {law}, 32 clients", seeds=4)
    assert mean(many, "hit") >= mean(one, "hit") - 0.03
    assert mean(many, "load") <= 1.10


@pytest.mark.slow
@pytest.mark.parametrize("which", ["", ", open loop", ", 8 workers"])
def test_adapters_are_loaded_less_often(which: str) -> None:
    name = f"200 adapters, Zipf, 8 slots{which}"
    ours, least = outcomes(name, seeds=2), outcomes(name, "least loaded", seeds=2)
    assert mean(ours, "cold") <= 0.7 * mean(least, "cold")
    assert mean(ours, "load") <= 1.10


@pytest.mark.slow
def test_a_replica_that_leaves_and_comes_back_is_given_its_share() -> None:
    row = outcomes("32 prefixes, Zipf, a replica leaves and joins", seeds=4)
    assert mean(row, "hit") > 0.975
    assert mean(row, "load") <= 1.25


def test_the_same_seed_gives_the_same_outcome() -> None:
    case = Case("short", requests=200)
    assert run(case, "tidegate", 3) == run(case, "tidegate", 3)


@pytest.mark.slow
def test_where_not_all_fits_what_fits_is_kept() -> None:
    name = "64 prefixes, Zipf, 8 fit a replica"
    ours, rival = outcomes(name, seeds=3), outcomes(name, "cache aware", seeds=3)
    assert mean(ours, "hit") >= 0.97 * mean(rival, "hit")
    assert mean(ours, "ttft_mean") <= 1.02 * mean(rival, "ttft_mean")
