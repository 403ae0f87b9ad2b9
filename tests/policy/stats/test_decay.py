"""A decaying count halves in a half-life and converges to the rate of its events."""

from __future__ import annotations

import pytest

from policy.stats.decay import DecayingCount


def test_a_count_halves_in_a_half_life() -> None:
    count = DecayingCount(10.0)
    count.add(5.0, 8.0)
    assert [count.count(at) for at in (5.0, 15.0, 25.0)] == pytest.approx([8.0, 4.0, 2.0])
    assert count.count(0.0) == 8.0  # an instant in the past is taken as the last one


def test_a_steady_stream_gives_its_rate() -> None:
    count = DecayingCount(60.0)
    for tick in range(10_000):
        count.add(0.1 * tick, 0.3)
    assert count.rate(1000.0) == pytest.approx(3.0, rel=0.01)
