"""The benchmark of adapters: deterministic, whole, and what is claimed of it."""

from __future__ import annotations

import pytest

from sim.benchmarks.adapters.benchmark import NAMES, Fleet, compare, compare_seeds, traffic

SMALL = traffic(adapters=40, exponent=1.0, rate=60.0, requests=260, together=1.5, seed=3)


def test_one_seed_is_one_outcome() -> None:
    assert compare(SMALL, Fleet(2, 4)) == compare(SMALL, Fleet(2, 4))
    three, four = compare_seeds(SMALL, Fleet(2, 4), 2)
    assert three == compare(SMALL, Fleet(2, 4)) != four


def test_all_policies_are_played_and_say_how_far_they_are() -> None:
    said: list[tuple[str, int]] = []
    found = compare(SMALL, Fleet(2, 4), lambda name, sent: said.append((name, sent)))
    assert tuple(found.policies) == NAMES == ("placement", "least_loaded", "serve_multiplex")
    assert said == [(name, sent) for name in NAMES for sent in (250, 260)]
    for each in found.policies.values():
        assert 0 < each.loads <= 2 * 260 and each.ttft_p95_s > 0.0
        assert 1.0 <= each.load_max_over_mean <= 2.0


def test_where_all_adapters_fit_each_is_loaded_once_or_for_each_replica() -> None:
    few = traffic(adapters=4, exponent=0.0, rate=50.0, requests=300, together=1.0, seed=1)
    found = compare(few, Fleet(2, 8)).policies
    assert 4 <= found["placement"].loads <= 8
    assert found["least_loaded"].loads == 8


def test_a_single_replica_and_a_single_request_are_played() -> None:
    one = traffic(adapters=1, exponent=0.0, rate=1.0, requests=1, together=1.0, seed=0)
    for each in compare(one, Fleet(1, 1)).policies.values():
        assert each.loads == 1 and each.load_max_over_mean == 1.0


@pytest.mark.slow
def test_a_thousand_adapters_need_a_third_fewer_loads_and_less_time_to_the_first_token() -> None:
    asked = traffic(adapters=1000, exponent=1.0, rate=100.0, requests=12_000, together=1.5, seed=1)
    found = compare(asked, Fleet(4, 8)).policies
    ours = found.pop("placement")
    for each in found.values():
        assert ours.loads <= 0.7 * each.loads
        assert ours.ttft_p95_s < each.ttft_p95_s
    assert ours.load_max_over_mean <= 1.25
    assert ours.moves_per_min <= 1.0
