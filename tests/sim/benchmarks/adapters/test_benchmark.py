"""The adapter benchmark: deterministic, complete, and its published claims."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from sim.benchmarks.adapters.benchmark import (
    NAMES,
    AdapterTraffic,
    ReplicasAndSlots,
    arrivals,
    compare,
    compare_seeds,
)

SMALL = AdapterTraffic(adapters=40, exponent=1.0, rate=60.0, requests=260, burst_size=1.5, seed=3)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_result() -> None:
    assert compare(SMALL, ReplicasAndSlots(2, 4)) == compare(SMALL, ReplicasAndSlots(2, 4))
    three, four = compare_seeds(SMALL, ReplicasAndSlots(2, 4), 2)
    assert three == compare(SMALL, ReplicasAndSlots(2, 4)) != four


def test_every_policy_runs_and_reports_its_progress() -> None:
    reported: list[tuple[str, int]] = []
    found = compare(SMALL, ReplicasAndSlots(2, 4), lambda name, sent: reported.append((name, sent)))
    assert tuple(found.policies) == NAMES == ("placement", "least_loaded", "serve_multiplex")
    assert reported == [(name, sent) for name in NAMES for sent in (250, 260)]
    for each in found.policies.values():
        assert 0 < each.loads <= 2 * 260 and each.ttft_p95_s > 0.0
        assert 1.0 <= each.load_max_over_mean <= 2.0


def test_adapters_that_all_fit_are_loaded_at_most_once_per_replica() -> None:
    few = AdapterTraffic(adapters=4, exponent=0.0, rate=50.0, requests=300, burst_size=1.0, seed=1)
    found = compare(few, ReplicasAndSlots(2, 8)).policies
    assert 4 <= found["placement"].loads <= 8
    assert found["least_loaded"].loads == 8


@pytest.mark.slow
def test_placement_of_1000_adapters_has_a_third_fewer_loads_and_a_lower_ttft() -> None:
    asked = AdapterTraffic(adapters=1000, exponent=1.0, rate=100.0, requests=12_000, burst_size=1.5, seed=1)
    found = compare(asked, ReplicasAndSlots(4, 8)).policies
    placement = found.pop("placement")
    for each in found.values():
        assert placement.loads <= 0.7 * each.loads
        assert placement.ttft_p95_s < each.ttft_p95_s
    assert placement.load_max_over_mean <= 1.25
    assert placement.moves_per_min <= 1.0


TRAFFIC = AdapterTraffic(adapters=50, exponent=1.0, rate=10.0, requests=4000, burst_size=1.5, seed=1)


def test_arrivals_are_in_order_and_have_the_rate() -> None:
    made = arrivals(TRAFFIC)
    assert len(made) == 4000 and all(one.at <= other.at for one, other in pairwise(made))
    assert made[-1].at == pytest.approx(400.0, rel=0.1)


def test_the_first_adapter_is_requested_twice_as_often_as_the_second() -> None:
    counts = [count for _, count in Counter(each.adapter for each in arrivals(TRAFFIC)).most_common()]
    assert counts[0] / 4000 == pytest.approx(1.0 / 4.499, rel=0.15)
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.25)
    even = Counter(each.adapter for each in arrivals(TRAFFIC._replace(exponent=0.0)))
    assert max(even.values()) < 4 * min(even.values())


@pytest.mark.parametrize("burst_size", [1.0, 1.5, 4.0])
def test_a_call_has_simultaneous_requests_for_one_adapter(burst_size: float) -> None:
    made = arrivals(TRAFFIC._replace(burst_size=burst_size))
    calls = Counter(each.at for each in made)
    assert len(made) / len(calls) == pytest.approx(burst_size, rel=0.1)
    assert len({(each.at, each.adapter) for each in made}) == len(calls)
