"""The three parts of a policy's regret, by hand and as laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.benchmarks.policies.ranking import split
from tests.sim.oracle.loads import ATTAINED, LEADS, LOADS, problem


def test_each_part_is_what_its_freedom_saves() -> None:
    """One and a half replicas, a gap of 15 s, and half a replica: with a lead of 10 s."""
    found = split(100.0, problem([15, 0, 0, 0, 5], lead_s=10.0))
    assert found.fluid_s == pytest.approx(5 * 2.0)
    assert found.integrality_s == pytest.approx(5 * 3 - 10.0)
    assert found.lead_s == pytest.approx(10.0)
    assert found.achievable_s == pytest.approx(25.0)
    assert found.forecast_s == pytest.approx(75.0)
    assert found.lower_s == pytest.approx(10.0 + 0.5 * 10.0)


@pytest.mark.slow
@given(LOADS, LEADS, ATTAINED, st.floats(0, 1000))
def test_the_parts_sum_to_what_the_policy_took(
    tenths: list[int], lead_s: float, attainment: float, policy_s: float
) -> None:
    found = split(policy_s, problem(tenths, lead_s, attainment))
    assert found.fluid_s + found.integrality_s + found.lead_s + found.forecast_s == pytest.approx(policy_s)
    assert found.integrality_s >= -1e-6
    assert found.fluid_s <= found.lower_s + 1e-6
    assert found.lower_s <= found.achievable_s + 1e-6
