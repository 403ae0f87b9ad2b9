"""Pareto fronts and their interpolation, by examples and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.benchmarks.policies.gpu_time_ranking import (
    AttainmentPoint,
    averaged,
    front,
    hours_at,
    mixed_hours,
    split,
)
from tests.sim.oracle.loads import ATTAINED, LEADS, LOADS, problem

# Rounded, so that points tie.
POINTS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 20)).map(
        lambda drawn: AttainmentPoint(drawn[0] / 20, drawn[1])
    ),
    max_size=12,
)
FRONT = (
    AttainmentPoint(0.90, 8.0, "thrifty"),
    AttainmentPoint(0.98, 10.0, "usual"),
    AttainmentPoint(1.0, 14.0, "careful"),
)


@pytest.mark.slow
@given(POINTS)
def test_a_front_has_exactly_the_points_that_no_other_dominates(points: list[AttainmentPoint]) -> None:
    found = front(points)
    for point in points:
        better = [
            other
            for other in points
            if other.attainment >= point.attainment and other.gpu_hours <= point.gpu_hours and other != point
        ]
        assert (point in found) == (not better)
    assert list(found) == sorted(found, key=lambda each: (each.attainment, each.gpu_hours))


@pytest.mark.parametrize(
    ("attainment", "hours"), [(0.99, 12.0), (0.98, 10.0), (0.94, 9.0), (0.5, 8.0), (1.0, 14.0)]
)
def test_gpu_hours_are_interpolated_between_points(attainment: float, hours: float) -> None:
    assert hours_at(FRONT, attainment) == pytest.approx(hours)
    assert hours_at(FRONT[:2], 0.99) is None and hours_at([], 0.0) is None


@pytest.mark.slow
@given(POINTS, st.floats(0, 1), st.floats(0, 1))
def test_higher_attainment_never_takes_fewer_gpu_hours(
    points: list[AttainmentPoint], one: float, other: float
) -> None:
    low, high = hours_at(points, min(one, other)), hours_at(points, max(one, other))
    assert high is None or (low is not None and low <= high + 1e-9)


@pytest.mark.slow
@given(POINTS, st.floats(0, 1))
def test_dominated_points_do_not_change_the_gpu_hours(
    points: list[AttainmentPoint], attainment: float
) -> None:
    assert hours_at(points, attainment) == pytest.approx(hours_at(front(points), attainment), nan_ok=True)


def test_a_mix_over_seeds_takes_what_is_missed_where_it_saves_most() -> None:
    # A hundredth of attainment costs 1 GPU-hour in the first seed and 3 in the second.
    seeds = [
        (AttainmentPoint(0.98, 8.0), AttainmentPoint(1.0, 10.0)),
        (AttainmentPoint(0.98, 4.0), AttainmentPoint(1.0, 10.0)),
    ]
    assert mixed_hours(seeds, 1.0) == pytest.approx(10.0)
    assert mixed_hours(seeds, 0.99) == pytest.approx((10.0 + 4.0) / 2)
    assert mixed_hours(seeds, 0.98) == pytest.approx(6.0)
    assert mixed_hours(seeds, 0.5) == pytest.approx(6.0)
    assert mixed_hours(seeds, 1.01) is None and mixed_hours([seeds[0], ()], 0.5) is None


@pytest.mark.slow
@given(st.lists(st.tuples(POINTS, POINTS), min_size=1, max_size=3), st.floats(0, 1))
def test_no_policy_takes_less_than_the_mix_of_all(
    drawn: list[tuple[list[AttainmentPoint], list[AttainmentPoint]]], attainment: float
) -> None:
    """Two seeds; a policy has as many settings in each."""
    policies = [
        tuple(zip(*zip(one, other, strict=False), strict=True)) for one, other in drawn if one and other
    ]
    known = [tuple(point for policy in policies for point in policy[seed]) for seed in (0, 1)]
    least = mixed_hours(known, attainment)
    for policy in policies:
        hours = hours_at(averaged(dict(enumerate(policy))), attainment)
        assert hours is None or (least is not None and least <= hours + 1e-9)


def test_settings_are_averaged_over_the_seeds() -> None:
    one, other = (
        [AttainmentPoint(0.5, 8.0, "a"), AttainmentPoint(1.0, 10.0, "b")],
        [AttainmentPoint(1.0, 6.0, "a"), AttainmentPoint(1.0, 12.0, "b")],
    )
    assert averaged({1: one, 2: other}) == (AttainmentPoint(0.75, 7.0, "a"), AttainmentPoint(1.0, 11.0, "b"))


def test_the_regret_is_split_by_cause() -> None:
    found = split(100.0, 60.0, problem([15, 0, 0, 0, 5], lead_s=10.0))
    assert found.integrality_s == pytest.approx(5 * 3 - 10.0)
    assert found.lead_s == pytest.approx(10.0)
    assert found.forecast_s == pytest.approx(40.0)


@pytest.mark.slow
@given(LOADS, LEADS, ATTAINED, st.floats(0, 1000), st.floats(0, 1000))
def test_rounding_saves_nothing_and_the_forecast_is_what_the_optimum_does_not_take(
    tenths: list[int], lead_s: float, attainment: float, policy_s: float, optimum_s: float
) -> None:
    found = split(policy_s, optimum_s, problem(tenths, lead_s, attainment))
    assert optimum_s + found.forecast_s == pytest.approx(policy_s)
    assert found.integrality_s >= -1e-6
