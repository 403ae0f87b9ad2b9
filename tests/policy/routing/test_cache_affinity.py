"""Cache affinity: adapters assumed loaded, and the prices that keep homes and load even."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.hashing import rendezvous
from policy.routing.cache_affinity import (
    AssumedAdapterSlots,
    PopularityCounter,
    ReplicaShare,
    ShareSums,
    add_taker,
    balance_of,
    crowd_price,
    mean_load,
)

REPLICAS = [0x1111_2222_3333_4444 * i + 7 for i in range(1, 6)]


def test_homes_are_shared_out_by_weight() -> None:
    weights = dict(zip(REPLICAS[:3], (1.0, 1.0, 2.0), strict=True))
    wins = Counter(
        max(weights, key=lambda replica: rendezvous(item * 977, replica, weights[replica]))
        for item in range(4000)
    )
    assert wins[REPLICAS[2]] == pytest.approx(2000, rel=0.1)
    assert wins[REPLICAS[0]] == pytest.approx(1000, rel=0.1)


def test_the_least_recently_used_adapter_is_evicted() -> None:
    slots = AssumedAdapterSlots(2)
    assert slots.use(1) and slots.use(3)
    assert not slots.use(1)
    assert slots.oldest(1) == [3]
    assert slots.use(5)
    assert 3 not in slots and 1 in slots and 5 in slots


def test_a_report_of_loaded_adapters_replaces_the_assumption() -> None:
    slots = AssumedAdapterSlots(3)
    slots.use(1)
    slots.use(3)
    slots.report([3, 5], [])
    assert 3 in slots and 5 in slots
    assert 1 in slots, "requested, and not reported yet"
    assert slots.oldest(1) == [5], "not used by this worker"
    slots.report([1, 3], [])
    assert 5 not in slots and len(slots) == 2
    slots.report([3], [])
    assert 1 not in slots, "was reported, and is unloaded now"
    slots.use(7)
    slots.report([3], [7])
    assert 7 not in slots, "the load failed"
    assert slots.use(7), "it has to be loaded again"


def test_a_load_in_progress_evicts_nothing_before_the_next_report() -> None:
    slots = AssumedAdapterSlots(2)
    slots.report([1, 3], [])
    slots.use(5)
    slots.report([1, 3], [])  # the load is in progress
    assert 5 in slots and 1 in slots and 3 in slots
    assert not slots.loaded(5) and slots.loaded(3)
    slots.report([5, 1], [])
    assert slots.loaded(5) and 3 not in slots


def test_a_first_token_proves_the_load() -> None:
    slots = AssumedAdapterSlots(2)
    slots.report([], [])
    slots.use(5)
    slots.confirm(5)
    slots.report([], [])
    assert 5 not in slots, "evicted before the replica reported it"


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 30), max_size=6)), max_size=60),
    st.integers(1, 8),
)
def test_resident_adapters_are_bounded(events: list[tuple[bool, list[int]]], count: int) -> None:
    slots = AssumedAdapterSlots(count)
    for is_report, adapters in events:
        if is_report:
            slots.report(adapters[:count], [])
            fresh = AssumedAdapterSlots(count)
            fresh.report(adapters[:count], [])
            assert all(adapter in fresh for adapter in adapters[:count])
        else:
            for adapter in adapters:
                slots.use(adapter)
                assert adapter in slots
        assert len(slots) <= 2 * count


@given(st.lists(st.integers(0, 1000), max_size=300), st.integers(1, 50))
def test_popularity_is_bounded(keys: list[int], span: int) -> None:
    popular = PopularityCounter(span)
    for key in keys:
        popular.add(key)
        assert len(popular) <= 2 * span
        assert 0.0 < popular.share(key) <= 1.0


def shares(*loads: float) -> list[ReplicaShare]:
    found = []
    for load in loads:
        share = ReplicaShare()
        share.load = load
        found.append(share)
    return found


@given(
    st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 14), st.floats(0.0, 50.0)), max_size=40),
)
def test_shares_are_leveled_to_the_sums_in_their_order(
    loads: list[float], changes: list[tuple[int, float]]
) -> None:
    every, sums = shares(*loads), ShareSums()
    counted = set(every[::2])
    sums.start([(share, share in counted) for share in every])
    for place, more in changes:
        if place >= len(every):
            every += shares(0.0)
        share = every[min(place, len(every) - 1)]
        share.load, share.homes, share.weight = share.load + more, share.homes + 1.0, 1.0 + more
        sums.put(share)
        counted.add(share)
        [leveled] = shares(0.0)
        sums.level(leveled)
        present = [each for each in every if each in counted]
        weights = sum(each.weight for each in present)
        assert leveled.load == 1.0 / weights * sum(each.load for each in present)
        assert leveled.homes == 1.0 / weights * sum(each.homes for each in present)


def test_a_load_within_chance_of_the_mean_has_almost_no_price() -> None:
    even = shares(104, 100, 98, 98)
    assert balance_of(even).share_price(even[0], leverage=1.0) < 0.05


def test_above_the_bound_a_warm_home_costs_more_than_a_cold_prefill() -> None:
    uneven = shares(500, 400, 400, 380)
    balance = balance_of(uneven)
    assert balance.share_price(uneven[0], leverage=1.0) > 2.0
    assert balance.share_price(uneven[0], leverage=0.01) < 1.0, "a prefix with too little traffic to help"
    assert balance.share_price(uneven[3], leverage=1.0) < 0.0


def test_copies_that_take_over_traffic_suspend_the_price() -> None:
    uneven = shares(500, 400, 400, 380)
    add_taker(uneven[0], uneven[3], 1.0, mean_load(uneven))  # 80 above the mean of 420: even at 500
    assert balance_of(uneven).share_price(uneven[0], leverage=1.0) < 1.0
    grown = shares(600, 480, 480, 480)
    grown[0].takers = uneven[0].takers
    assert balance_of(grown).share_price(grown[0], leverage=1.0) > 2.0, "the copy had its time"
    uneven[1].load = uneven[2].load = 340.0
    uneven[3].load = 500.0
    assert balance_of(uneven).share_price(uneven[0], leverage=1.0) > 2.0, "the taker is overloaded itself"


def test_a_new_home_is_cheapest_at_the_replica_with_the_least_load_and_homes() -> None:
    uneven = shares(100, 90, 120, 110)
    uneven[1].homes = 10.0
    balance = balance_of(uneven, worth=2.0)
    prices = [(share.due - balance.least) * balance.unit for share in uneven]
    assert min(prices) == prices[0] == 0.0 and prices[1] > 0.0


def test_the_fair_share_follows_the_weight() -> None:
    uneven = shares(100, 100, 100, 40)
    uneven[3].weight = 0.2
    balance = balance_of(uneven)
    assert balance.share_price(uneven[3], leverage=1.0) > balance.share_price(uneven[0], leverage=1.0)


def test_loads_beyond_the_window_are_halved() -> None:
    many = shares(3000, 1000, 1000, 1000)
    assert balance_of(many).load == 750.0
    assert many[0].load == 1500.0


def test_a_replica_with_more_homes_than_the_mean_pays_for_the_next() -> None:
    share = shares(100)[0]
    share.homes = 9.0
    assert crowd_price(share, 8.0, free=1.0) == 0.0, "one more than the mean is free"
    share.homes = 11.0
    assert crowd_price(share, 8.0, free=1.0) > 1.0, "more than a prefill elsewhere"
    assert crowd_price(share, 8.0, free=1.25) == 0.0
    assert crowd_price(share, 0.0, free=1.0) == 0.0, "no replica has homes"
