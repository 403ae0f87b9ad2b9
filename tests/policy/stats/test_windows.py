"""Counts per second: all counts within the window are summed, older ones are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.stats.windows import RateBins

SPANS = st.lists(st.tuples(st.floats(0, 30), st.floats(0, 30), st.integers(0, 1000)), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("spread", "window", "counted"),
    [
        # A count is spread evenly over its seconds, and the window includes its part of its first second.
        ((10.5, 12.5, 4.0), (10.0, 10.9), 1.0),
        ((10.5, 12.5, 4.0), (11.0, 11.9), 2.0),
        ((10.5, 12.5, 4.0), (12.0, 12.9), 1.0),
        ((10.0, 11.0, 8.0), (10.75, 12.0), 2.0),
        # Of a long span, the part within the window.
        ((0.0, 600.0, 600.0), (540.0, 600.0), 60.0),
        # Seconds without counts.
        ((10.0, 10.0, 1.0), (11.0, 12.0), 0.0),
        ((10.0, 10.0, 1.0), (2.0, 5.0), 0.0),
    ],
)
def test_the_window_has_its_part_of_what_was_counted(
    spread: tuple[float, float, float], window: tuple[float, float], counted: float
) -> None:
    bins = RateBins(60, 2)
    assert bins.sums(*window) == [0.0, 0.0]
    begin, end, count = spread
    bins.spread(begin, end, [(1, count)])
    assert bins.sums(*window) == [0.0, pytest.approx(counted)]


def test_counts_older_than_the_window_are_dropped() -> None:
    bins = RateBins(6, 1)
    bins.spread(1.0, 2.0, [(0, 3.0)])
    bins.spread(100.0, 100.0, [(0, 1.0)])
    assert bins.sums(0.0, 100.0) == [1.0]
    bins.spread(3.0, 4.0, [(0, 7.0)])
    assert bins.sums(0.0, 100.0) == [1.0]


def test_the_shortest_recent_span_with_enough_counts_is_found() -> None:
    bins = RateBins(600, 2)
    assert bins.latest_s(10.0, 0, 1.0, 5.0, 600.0) == 600.0
    bins.spread(0.0, 100.0, [(0, 100.0)])
    bins.spread(100.0, 110.0, [(0, 200.0)])
    # The last ten seconds have twenty counts each, those before have one.
    assert bins.latest_s(110.0, 0, 60.0, 1.0, 600.0) == pytest.approx(3.0)
    assert bins.latest_s(110.0, 0, 60.0, 30.0, 600.0) == 30.0
    assert bins.latest_s(110.0, 0, 250.0, 1.0, 600.0) == pytest.approx(60.0)
    assert bins.latest_s(110.0, 0, 250.0, 1.0, 40.0) == 40.0
    assert bins.latest_s(110.0, 0, 301.0, 1.0, 600.0) == 600.0
    assert bins.latest_s(110.0, 1, 1.0, 1.0, 600.0) == 600.0


@given(SPANS)
def test_the_sum_has_every_count_within_the_window(spans: list[tuple[float, float, int]]) -> None:
    bins = RateBins(60, 1)
    for one, other, count in spans:
        bins.spread(min(one, other), max(one, other), [(0, float(count))])
    assert bins.sums(0.0, 31.0)[0] == pytest.approx(sum(count for _, _, count in spans))
