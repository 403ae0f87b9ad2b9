"""Traffic for adapters: the same for the same seed, by Zipf's law, in calls."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from sim.benchmarks.adapters.benchmark import Traffic, arrivals

TRAFFIC = Traffic(
    adapters=50,
    exponent=1.0,
    rate=10.0,
    requests=4000,
    together=1.5,
    prompt_tokens=64,
    output_tokens=8,
    seed=1,
)


def test_one_seed_is_one_traffic() -> None:
    assert arrivals(TRAFFIC) == arrivals(TRAFFIC)
    assert arrivals(TRAFFIC) != arrivals(TRAFFIC._replace(seed=2))


def test_it_comes_in_order_at_the_rate() -> None:
    made = arrivals(TRAFFIC)
    assert len(made) == 4000 and all(one.at <= other.at for one, other in pairwise(made))
    assert made[-1].at == pytest.approx(400.0, rel=0.1)


def test_the_first_is_asked_for_twice_as_often_as_the_second() -> None:
    counts = [count for _, count in Counter(each.adapter for each in arrivals(TRAFFIC)).most_common()]
    assert counts[0] / 4000 == pytest.approx(1.0 / 4.499, rel=0.15)
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.25)
    even = Counter(each.adapter for each in arrivals(TRAFFIC._replace(exponent=0.0)))
    assert max(even.values()) < 4 * min(even.values())


@pytest.mark.parametrize("together", [1.0, 1.5, 4.0])
def test_calls_bring_requests_for_one_adapter_at_once(together: float) -> None:
    made = arrivals(TRAFFIC._replace(together=together))
    calls = Counter(each.at for each in made)
    assert len(made) / len(calls) == pytest.approx(together, rel=0.1)
    assert len({(each.at, each.adapter) for each in made}) == len(calls)


def test_tokens_are_at_least_one_and_about_their_mean() -> None:
    made = arrivals(TRAFFIC)
    for tokens, mean in (
        ([each.input_tokens for each in made], 64),
        ([each.output_tokens for each in made], 8),
    ):
        assert min(tokens) >= 1 and sum(tokens) / len(tokens) == pytest.approx(mean, rel=0.1)
    assert {each.output_tokens for each in arrivals(TRAFFIC._replace(output_tokens=1))} == {1}
