"""The rate that a replica attains is found between one that does and one that does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.oracle.replica_capacity import rate_attaining


@pytest.mark.slow
@given(st.floats(1.01, 9.9), st.sampled_from([0.001, 0.01, 0.1]))
def test_the_edge_is_found_from_below(edge: float, precision: float) -> None:
    tried: list[float] = []

    def run(rate: float) -> float:
        tried.append(rate)
        return 0.995 if rate <= edge else 0.6

    found = rate_attaining(run, 1.0, 10.0, 0.99, precision)
    assert found in tried
    assert edge / (1 + precision) <= found <= edge


@pytest.mark.parametrize(
    ("shown", "said"),
    [(0.5, "already at 1 requests per second 0.5 attain, expected 0.99"), (1.0, "still at 10 requests")],
)
def test_an_edge_outside_is_refused(shown: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rate_attaining(lambda _: shown, 1.0, 10.0, 0.99)


def test_rates_must_make_a_range() -> None:
    with pytest.raises(ValueError, match="expected 0 < low < high"):
        rate_attaining(lambda _: 1.0, 2.0, 2.0, 0.99)


def test_the_lowest_rate_takes_the_longest_and_is_tried_last() -> None:
    tried: list[float] = []

    def run(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= 3.0 else 0.0

    rate_attaining(run, 0.1, 10.0, 0.99)
    assert min(tried) > 2.0
    tried.clear()
    with pytest.raises(ValueError, match="already at 0"):
        rate_attaining(lambda rate: run(rate) - 1.0, 0.1, 10.0, 0.99)
    assert tried[-1] == min(tried) == 0.1 and len(tried) < 10
