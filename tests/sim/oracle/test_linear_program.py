"""The lower bound, by examples and as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.errors import TargetError
from sim.oracle.clairvoyant import clairvoyant
from sim.oracle.linear_program import lower_bound
from tests.sim.oracle.loads import ATTAINED, LEADS, LOADS, cheapest, problem

SLACK = 1e-6
WAITS = st.sampled_from([0.0, 5.0, 12.0])


def test_the_bound_without_a_lead_time_is_the_required_work() -> None:
    asked = problem([3, 28, 0, 14, 9], attainment=0.9)
    assert lower_bound(asked).replica_s == pytest.approx(0.9 * asked.load.sum() * asked.bin_s)


@pytest.mark.parametrize(
    ("lead_s", "expected"),
    [
        (0.0, 10.0),
        (4.0, 14.0),  # started again, 4 s ahead
        (15.0, 25.0),  # costs as much as keeping it for the gap of 15 s
        (40.0, 25.0),  # stays
    ],
)
def test_a_gap_costs_the_shorter_of_the_lead_time_and_the_gap(lead_s: float, expected: float) -> None:
    assert lower_bound(problem([10, 0, 0, 0, 10], lead_s)).replica_s == pytest.approx(expected)


def test_a_replica_needed_within_the_first_lead_time_is_already_running() -> None:
    assert lower_bound(problem([0, 10], lead_s=60.0)).replica_s == pytest.approx(5.0 + 5.0)


def test_drops_are_placed_where_they_save_a_start() -> None:
    """A tenth of 22 tenths: all 2 of the isolated bin, which needs a start of 20 s, and .2 of the others."""
    found = lower_bound(problem([10, 10, 0, 0, 0, 0, 2], lead_s=20.0, attainment=0.9))
    assert found.replica_s == pytest.approx(10.0 - 0.1)
    assert found.dropped.sum() == pytest.approx(2.2)
    assert found.dropped[6] == pytest.approx(2.0)


def test_the_wait_limit_spreads_a_peak() -> None:
    peak = [0, 0, 30, 0, 0, 0]
    assert lower_bound(problem(peak, lead_s=100.0)).replica_s == pytest.approx(3 * 15.0)
    # One and a half replicas from 0 to 20 s.
    assert lower_bound(problem(peak, lead_s=100.0, wait_s=5.0)).replica_s == pytest.approx(1.5 * 20.0)


def test_the_bound_keeps_the_replica_limits() -> None:
    assert lower_bound(problem([0, 5, 0], least=2)).replica_s == pytest.approx(2 * 15.0)
    bounded = lower_bound(problem([10, 30, 10], attainment=0.8, most=2))
    assert bounded.ready.max() == pytest.approx(2.0)
    assert bounded.dropped[1] == pytest.approx(10.0)


def test_too_few_replicas_are_refused() -> None:
    with pytest.raises(TargetError, match=r"2 replicas cannot serve 0\.99 of"):
        lower_bound(problem([10, 30, 10], attainment=0.99, most=2))


@pytest.mark.slow
@given(LOADS, LEADS, ATTAINED, WAITS, st.integers(0, 2))
def test_no_plan_of_whole_replicas_costs_less(
    tenths: list[int], lead_s: float, attainment: float, wait_s: float, least: int
) -> None:
    asked = problem(tenths, lead_s, attainment, wait_s, least=least)
    assert lower_bound(asked).replica_s <= clairvoyant(asked).replica_s + SLACK


@pytest.mark.slow
@given(LOADS.filter(lambda tenths: len(tenths) <= 4), LEADS, ATTAINED)
def test_the_bound_is_at_most_the_cost_of_the_best_plan(
    tenths: list[int], lead_s: float, attainment: float
) -> None:
    asked = problem(tenths, lead_s, attainment)
    assert lower_bound(asked).replica_s <= cheapest(asked) + SLACK


@pytest.mark.slow
@given(LOADS, LEADS, st.sampled_from([1.0, 0.9]), WAITS, st.data())
def test_more_demand_never_costs_less_without_drops(
    tenths: list[int], lead_s: float, attainment: float, wait_s: float, data: st.DataObject
) -> None:
    """Allowed drops grow with the demand; with drops, therefore, all demand is scaled alike."""
    if attainment == 1.0:
        more = [each + data.draw(st.integers(0, 9)) for each in tenths]
    else:
        more = [each * 2 for each in tenths]
    before = lower_bound(problem(tenths, lead_s, attainment, wait_s)).replica_s
    assert lower_bound(problem(more, lead_s, attainment, wait_s)).replica_s >= before - SLACK


@pytest.mark.slow
@given(LOADS, LEADS, st.sampled_from([0.5, 5.0, 30.0]), ATTAINED, WAITS)
def test_a_longer_lead_time_never_costs_less(
    tenths: list[int], lead_s: float, longer_s: float, attainment: float, wait_s: float
) -> None:
    short = lower_bound(problem(tenths, lead_s, attainment, wait_s)).replica_s
    assert lower_bound(problem(tenths, lead_s + longer_s, attainment, wait_s)).replica_s >= short - SLACK


@pytest.mark.slow
@given(LOADS, LEADS, ATTAINED, WAITS)
def test_a_longer_wait_limit_never_costs_more(
    tenths: list[int], lead_s: float, attainment: float, wait_s: float
) -> None:
    longer_wait = lower_bound(problem(tenths, lead_s, attainment, wait_s + 5.0)).replica_s
    assert longer_wait <= lower_bound(problem(tenths, lead_s, attainment, wait_s)).replica_s + SLACK


@pytest.mark.slow
@given(LOADS, LEADS, ATTAINED)
def test_its_replicas_serve_all_but_the_drops(tenths: list[int], lead_s: float, attainment: float) -> None:
    asked = problem(tenths, lead_s, attainment)
    found = lower_bound(asked)
    took = found.ready * asked.mu * asked.bin_s
    assert np.all(took + found.dropped >= asked.demand - SLACK)
    assert found.dropped.sum() <= (1 - attainment) * asked.demand.sum() + SLACK
