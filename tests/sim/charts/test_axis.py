"""Axes have round numbers, and hold every value."""

from __future__ import annotations

import pytest

from sim.charts.axis import linear, logarithmic, rounded, times


@pytest.mark.parametrize(
    ("step", "expected"), [(1.0, 1.0), (1.1, 2.0), (2.0, 2.0), (3.0, 5.0), (0.07, 0.1), (600.0, 1000.0)]
)
def test_steps_are_round(step: float, expected: float) -> None:
    assert rounded(step) == pytest.approx(expected)


@pytest.mark.parametrize("high", [0.0, 0.003, 1.0, 7.0, 99.9, 12_345.0])
def test_a_linear_axis_holds_its_values(high: float) -> None:
    scale = linear(high, 100.0, 0.0)
    assert scale.high >= high and scale(0.0) == 100.0 and scale(scale.high) == 0.0
    ticks = scale.ticks(5)
    assert ticks[0] == 0.0 and 3 <= len(ticks) <= 7 and ticks[-1] == pytest.approx(scale.high)


def test_what_is_counted_has_whole_ticks() -> None:
    for high in (0.0, 1.0, 2.0, 3.0, 7.0):
        ticks = linear(high, 100.0, 0.0, whole=True).ticks(5)
        assert ticks == [int(tick) for tick in ticks] and ticks[-1] >= high


def test_a_logarithmic_axis_has_round_ends_and_cuts_what_is_too_small() -> None:
    scale = logarithmic(0.0011, 7.0, 100.0, 0.0)
    assert (scale.low, scale.high) == pytest.approx((0.001, 10.0))
    assert scale(0.1) == pytest.approx(50.0) and scale(1e-6) == pytest.approx(100.0)
    assert scale.ticks(5) == pytest.approx([0.001, 0.01, 0.1, 1.0, 10.0])
    assert logarithmic(1.0, 1.0, 100.0, 0.0)(1.0) == 0.0
    assert logarithmic(1e-12, 1.0, 100.0, 0.0).low == pytest.approx(1e-5)


def test_a_short_logarithmic_axis_has_ticks_between_powers_of_ten() -> None:
    scale = logarithmic(0.06, 0.13, 100.0, 0.0)
    assert (scale.low, scale.high) == pytest.approx((0.05, 0.2))
    assert scale.ticks(5) == pytest.approx([0.05, 0.1, 0.2])
    assert logarithmic(0.03, 2.0, 100.0, 0.0).ticks(5) == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0])


@pytest.mark.parametrize(
    ("until", "expected"),
    [(5.0, [0, 1, 2, 3, 4, 5]), (3502.0, [0, 600, 1200, 1800, 2400, 3000]), (0.5, [0])],
)
def test_instants_are_whole_minutes(until: float, expected: list[float]) -> None:
    assert times(until) == expected


def test_a_month_has_no_more_instants_than_an_hour() -> None:
    assert len(times(30 * 86_400.0)) <= 7
