"""The plan of whole replicas, compared with all plans, and as a policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.engine.replica_capacity import Capability
from policy.errors import TargetError
from policy.scaling.view import Supply, View
from policy.signals.types import Signals
from sim.oracle import clairvoyant as planner
from sim.oracle.clairvoyant import (
    ClairvoyantPolicy,
    ReplicaCountPlan,
    clairvoyant,
    dropped,
    plan_layers,
    served_demand,
    verify,
)
from sim.oracle.linear_program import lower_bound
from sim.oracle.provisioning_problem import ProvisioningProblem
from tests.sim.oracle.loads import ATTAINED, LEADS, LOADS, cheapest, problem

NEEDS = st.lists(st.integers(0, 4), min_size=1, max_size=12)


def plan(needs: list[int], lead_s: float) -> ReplicaCountPlan:
    return plan_layers(np.array(needs), 5.0, lead_s)


@pytest.mark.parametrize(
    ("needs", "lead_s", "expected"),
    [
        (
            [1, 0, 0, 1],
            10.0,
            ReplicaCountPlan((0.0,), (1,), 20.0, 20.0),
        ),  # kept through a gap of one lead time
        ([1, 0, 0, 1], 9.0, ReplicaCountPlan((0.0, 5.0, 6.0), (1, 0, 1), 20.0, 19.0)),
        ([1, 1, 1, 1, 2, 1], 7.0, ReplicaCountPlan((0.0, 13.0, 25.0), (1, 2, 1), 30.0, 42.0)),
        (
            [0, 2, 0],
            60.0,
            ReplicaCountPlan((0.0, 10.0), (2, 0), 15.0, 20.0),
        ),  # needed before a start could be ready
        ([0, 0], 60.0, ReplicaCountPlan((0.0,), (0,), 10.0, 0.0)),
    ],
)
def test_replicas_start_one_lead_time_ahead(
    needs: list[int], lead_s: float, expected: ReplicaCountPlan
) -> None:
    assert plan(needs, lead_s) == expected


@pytest.mark.slow
@given(NEEDS, LEADS)
def test_the_cost_of_a_plan_is_the_sum_of_its_steps(needs: list[int], lead_s: float) -> None:
    found = plan(needs, lead_s)
    widths = np.diff([*found.at, found.ends_at])
    assert found.replica_s == pytest.approx(float(widths @ np.array(found.counts)))
    assert found.mean == pytest.approx(found.replica_s / (5.0 * len(needs)))


@pytest.mark.slow
@given(NEEDS, LEADS)
def test_needed_replicas_are_held_from_one_lead_time_before(needs: list[int], lead_s: float) -> None:
    found = plan(needs, lead_s)
    for index, need in enumerate(needs):
        for at in (5.0 * index, 5.0 * index + 4.9, max(0.0, 5.0 * index - lead_s + 0.01)):
            assert found.most_within(at, 0.0) >= need


@pytest.mark.slow
@given(NEEDS, st.floats(0, 70), st.floats(0, 30))
def test_the_maximum_of_an_interval_is_of_its_instants(needs: list[int], at: float, for_s: float) -> None:
    found = plan(needs, 7.0)
    instants = [at, *(begin for begin in found.at if at <= begin < at + for_s)]
    assert found.most_within(at, for_s) == max(found.most_within(instant, 0.0) for instant in instants)


@pytest.mark.slow
@given(LOADS.filter(lambda tenths: len(tenths) <= 5), LEADS, st.integers(0, 1))
def test_no_other_plan_that_serves_all_costs_less(tenths: list[int], lead_s: float, least: int) -> None:
    asked = problem(tenths, lead_s, attainment=1.0, least=least)
    assert clairvoyant(asked).replica_s == pytest.approx(cheapest(asked))


@pytest.mark.slow
@given(LOADS.filter(lambda tenths: len(tenths) <= 4), LEADS, ATTAINED)
def test_a_plan_with_drops_never_costs_more(tenths: list[int], lead_s: float, attainment: float) -> None:
    asked = problem(tenths, lead_s, attainment)
    needs = served_demand(asked.load, asked)
    assert dropped(asked.load, needs) <= asked.spare + 1e-9
    cost = plan_layers(needs, asked.bin_s, lead_s).replica_s
    assert cheapest(asked) - 1e-9 <= cost <= clairvoyant(problem(tenths, lead_s)).replica_s + 1e-9


@pytest.mark.parametrize(
    ("tenths", "lead_s", "attainment", "expected"),
    [
        # The isolated bin costs a start of 20 s and its 5 s, the shallow one 5 s; only one may be dropped.
        ([11, 10, 10, 10, 10, 0, 0, 0, 0, 0, 1], 20.0, 0.98, [2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]),
        # Both may be dropped.
        ([11, 10, 10, 10, 10, 0, 0, 0, 0, 0, 1], 20.0, 0.96, [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]),
        # A drop at the edge of a stretch saves a bin; in its middle it saves nothing.
        ([20, 11, 20, 11], 10.0, 0.98, [2, 2, 2, 1]),
        # All demand may be dropped; the minimum of the mode stays.
        ([10, 20], 10.0, 0.0, [0, 0]),
    ],
)
def test_drops_are_chosen_for_the_largest_saving(
    tenths: list[int], lead_s: float, attainment: float, expected: list[int]
) -> None:
    asked = problem(tenths, lead_s, attainment)
    assert served_demand(asked.load, asked).tolist() == expected


def test_load_within_the_wait_limit_is_spread_over_later_bins() -> None:
    asked = problem([0, 0, 20, 0, 0], lead_s=5.0, wait_s=5.0)
    # One replica for two bins, started 5 s before.
    assert clairvoyant(asked) == ReplicaCountPlan((0.0, 5.0, 20.0), (0, 1, 0), 25.0, 15.0)


def test_plans_keep_the_bounds_and_too_few_replicas_are_refused() -> None:
    assert clairvoyant(problem([5, 30, 5], attainment=0.7, least=1, most=2)).counts == (1, 2, 1)
    with pytest.raises(TargetError, match=r"2 replicas cannot serve 0\.9 of"):
        clairvoyant(problem([5, 30, 5], attainment=0.9, most=2))


def test_drops_of_ten_replicas_cost_near_the_lower_bound() -> None:
    """Ten replicas for ten minutes with noise: whole replicas and whole stretches cost 3 % together."""
    noise = np.random.default_rng(1)
    rate = 20 + 8 * np.sin(np.arange(120) / 12)
    asked = ProvisioningProblem(
        demand=noise.poisson(5 * rate).astype(np.float64), bin_s=5.0, mu=2.0, lead_s=30.0
    )
    ratio = clairvoyant(asked).replica_s / lower_bound(asked).replica_s
    assert 1.0 <= ratio < 1.03


def view(at: float, least: int = 0, most: int = 8) -> View:
    return View(
        at=at,
        tick_s=5.0,
        model="m",
        mode="small",
        count=1,
        least=least,
        most=most,
        supply=Supply(),
        signals=Signals(),
        capability=Capability(mu=1.0, mu_max=1.0),
        lead_s=30.0,
    )


def test_the_policy_requests_replicas_ahead_of_their_need() -> None:
    policy = ClairvoyantPolicy(ReplicaCountPlan((0.0, 13.0, 25.0), (1, 2, 1), 30.0, 42.0))
    asked = {at: policy.decide(view(at), None).count for at in (0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 99.0)}
    assert asked == {0.0: 1, 5.0: 1, 10.0: 2, 15.0: 2, 20.0: 2, 25.0: 1, 99.0: 1}


def test_the_policy_keeps_the_mode_and_its_bounds() -> None:
    policy = ClairvoyantPolicy(ReplicaCountPlan((0.0,), (5,), 30.0, 150.0))
    assert policy.decide(view(0.0, most=3), None).count == 3
    assert policy.decide(view(0.0, least=6), None).count == 6
    assert policy.decide(view(0.0), None).fixed


ASKED = ProvisioningProblem(
    demand=np.random.default_rng(2).poisson(100.0, 200).astype(np.float64), bin_s=5.0, mu=2.0, attainment=0.98
)


def served(plan: ReplicaCountPlan) -> float:
    ready = np.array([plan.most_within(ASKED.bin_s * index, 0.0) for index in range(ASKED.bins)])
    return float(np.minimum(ASKED.load, ready).sum() / ASKED.load.sum())


def test_a_plan_that_attains_the_slo_is_not_changed() -> None:
    found = verify(ASKED, served)
    assert found.plan == clairvoyant(ASKED)
    assert found.fluid == 0.98
    assert found.attained == served(found.plan) >= 0.98


def test_slo_misses_of_replicas_reduce_the_allowed_drops_of_the_plan() -> None:
    found = verify(ASKED, lambda plan: served(plan) - 0.01)
    assert found.attained >= 0.98
    assert found.fluid == pytest.approx(0.99, abs=2 * planner.PRECISION)
    assert clairvoyant(ASKED).replica_s < found.plan.replica_s


def test_replicas_that_miss_more_than_the_slo_allows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"serves all of the fluid attains 0\.97, expected 0\.98"):
        verify(ASKED, lambda plan: served(plan) - 0.03)
