"""Pareto fronts and their interpolation, by examples and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.benchmarks.policies.gpu_time_ranking import Point, averaged, front, hours_at, split
from tests.sim.oracle.loads import ATTAINED, LEADS, LOADS, problem

# Rounded, so that points tie.
POINTS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 20)).map(lambda drawn: Point(drawn[0] / 20, drawn[1])),
    max_size=12,
)
FRONT = (Point(0.90, 8.0, "thrifty"), Point(0.98, 10.0, "usual"), Point(1.0, 14.0, "careful"))


@pytest.mark.slow
@given(POINTS)
def test_a_front_has_exactly_the_points_that_no_other_dominates(points: list[Point]) -> None:
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
def test_higher_attainment_never_takes_fewer_gpu_hours(points: list[Point], one: float, other: float) -> None:
    low, high = hours_at(points, min(one, other)), hours_at(points, max(one, other))
    assert high is None or (low is not None and low <= high + 1e-9)


@pytest.mark.slow
@given(POINTS, st.floats(0, 1))
def test_dominated_points_do_not_change_the_gpu_hours(points: list[Point], attainment: float) -> None:
    assert hours_at(points, attainment) == pytest.approx(hours_at(front(points), attainment), nan_ok=True)


def test_settings_are_averaged_over_the_seeds() -> None:
    one, other = [Point(0.5, 8.0, "a"), Point(1.0, 10.0, "b")], [Point(1.0, 6.0, "a"), Point(1.0, 12.0, "b")]
    assert averaged({1: one, 2: other}) == (Point(0.75, 7.0, "a"), Point(1.0, 11.0, "b"))


def test_the_regret_is_split_by_cause() -> None:
    found = split(100.0, problem([15, 0, 0, 0, 5], lead_s=10.0))
    assert found.fluid_s == pytest.approx(5 * 2.0)
    assert found.integrality_s == pytest.approx(5 * 3 - 10.0)
    assert found.lead_s == pytest.approx(10.0)
    assert found.achievable_s == pytest.approx(25.0)
    assert found.forecast_s == pytest.approx(75.0)


@pytest.mark.slow
@given(LOADS, LEADS, ATTAINED, st.floats(0, 1000))
def test_parts_of_regret_add_up(tenths: list[int], lead_s: float, attainment: float, policy_s: float) -> None:
    found = split(policy_s, problem(tenths, lead_s, attainment))
    assert found.fluid_s + found.integrality_s + found.lead_s + found.forecast_s == pytest.approx(policy_s)
    assert found.integrality_s >= -1e-6
    assert found.fluid_s <= found.achievable_s + 1e-6
