"""The search for the cheapest schedule, on replicas whose capacity is not what the fluid model assumes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.oracle.clairvoyant import ReplicaCountPlan, plan_layers
from sim.oracle.provisioning_problem import ProvisioningProblem
from sim.oracle.replica_schedule_search import (
    FLUID,
    EvaluatedSchedule,
    ScheduleEvaluation,
    Windows,
    cheapest_path,
    search,
)
from sim.simulator.run_record import Floats

# Half an hour of 20 requests a second, more or less; each replica is assumed to take 2.
BINS = 180
ASKED = ProvisioningProblem(
    demand=np.round(200 + 50 * np.sin(np.arange(BINS) / 20)), bin_s=10.0, mu=2.0, lead_s=30.0
)


class Replicas:
    """Replicas that take ``times`` what is assumed, by bin, and miss what is more."""

    def __init__(self, times: Floats, problem: ProvisioningProblem = ASKED) -> None:
        self.plans: list[ReplicaCountPlan] = []
        self._problem = problem
        self._takes = times * problem.mu * problem.bin_s

    def __call__(self, plan: ReplicaCountPlan) -> ScheduleEvaluation:
        self.plans.append(plan)
        bins = range(self._problem.bins)
        held = np.array([plan.most_within(self._problem.bin_s * index, 0.0) for index in bins])
        missed = np.maximum(self._problem.demand - held * self._takes, 0.0)
        attained = 1.0 - float(missed.sum() / self._problem.demand.sum())
        return ScheduleEvaluation(missed, attained, plan.replica_s)


def cheapest(found: list[EvaluatedSchedule], fluid: bool = False) -> float:
    return min(
        each.run.replica_s
        for each in found
        if each.run.attainment >= ASKED.attainment and (each.mu is not None or not fluid)
    )


@pytest.mark.slow
@pytest.mark.parametrize("times", [0.6, 1.0, 2.0, 4.0])
def test_fluid_plans_bracket_what_replicas_take(times: float) -> None:
    found = search(ASKED, Replicas(np.full(BINS, times)), runs=12)
    assert cheapest(found, fluid=True) < 1.15 * ASKED.demand.sum() / (ASKED.mu * times)
    assert found[0].mu == 1.2 * ASKED.mu


@pytest.mark.slow
@pytest.mark.parametrize("mu", [0.1, 16.0])
def test_more_fluid_plans_are_run_until_they_bracket_what_replicas_take(mu: float) -> None:
    """More than six steps from what is assumed: up, and down."""
    assumed = replace(ASKED, mu=mu)
    found = search(assumed, Replicas(np.full(BINS, ASKED.mu / mu), assumed), runs=14)
    enough = [each.run.attainment >= ASKED.attainment for each in found if each.mu is not None]
    assert len(enough) > FLUID and set(enough) == {True, False}
    assert cheapest(found, fluid=True) < 1.6 * ASKED.demand.sum() / ASKED.mu


def test_steps_with_the_same_needs_are_not_run_and_do_not_end_the_search() -> None:
    """A replica is assumed to take twenty times the load, and takes 0.8 of it."""
    idle = ProvisioningProblem(demand=np.ones(12), bin_s=10.0, mu=2.0, least=1)
    found = search(idle, Replicas(np.full(12, 0.04), idle), runs=10)
    assert [each.needs.tolist() for each in found[:2]] == [[1] * 12, [2] * 12]
    assert found[1].run.attainment == 1.0


@pytest.mark.slow
def test_a_capacity_that_changes_along_the_trace_is_followed() -> None:
    """Caches that fill triple what a replica takes: no multiple of one capacity fits both halves."""
    found = search(ASKED, Replicas(np.repeat([1.0, 3.0], BINS // 2)), runs=20)
    halves = np.split(ASKED.demand, 2)
    needed_s = halves[0].sum() / ASKED.mu + halves[1].sum() / (3 * ASKED.mu)
    assert cheapest(found, fluid=True) > 1.4 * needed_s
    assert cheapest(found) < 1.3 * needed_s


@pytest.mark.slow
def test_a_plan_that_holds_more_than_it_must_is_trimmed() -> None:
    """Replicas take three times as much in every second minute, as requests there are short."""
    peaks = np.where(np.arange(BINS) // 6 % 2, 1.0, 3.0)
    found = search(ASKED, Replicas(peaks), runs=30)
    assert cheapest(found) < 0.91 * cheapest(found, fluid=True)


@pytest.mark.slow
def test_every_schedule_was_run_once_and_no_more_than_asked_for() -> None:
    replicas = Replicas(np.linspace(1.0, 2.0, BINS))
    found = search(ASKED, replicas, runs=14)
    assert len(found) == len(replicas.plans) == 14
    assert len({each.needs.tobytes() for each in found}) == 14
    assert [each.run.replica_s for each in found] == [plan.replica_s for plan in replicas.plans]
    assert all(each.mu for each in found[:3]) and {each.mu for each in found[FLUID:]} == {None}


def test_misses_before_the_judged_bins_are_not_of_the_target() -> None:
    windows = Windows(ASKED, 30)
    assert windows.allowed == pytest.approx(0.01 * ASKED.demand[30:].sum())
    assert windows.missed(ScheduleEvaluation(np.ones(BINS), 0.9, 1.0)) == BINS - 30


@pytest.mark.slow
def test_replicas_that_never_attain_the_slo_end_the_search() -> None:
    found = search(ASKED, lambda plan: ScheduleEvaluation(ASKED.demand, 0.0, plan.replica_s), runs=10)
    assert len(found) == 10
    assert all(each.run.attainment == 0.0 for each in found)


def test_a_fleet_whose_whole_count_misses_the_slo_is_run_once() -> None:
    few = replace(ASKED, most=2)
    found = search(few, Replicas(np.ones(BINS), few), runs=10)
    assert [set(each.needs.tolist()) for each in found] == [{2}]


def test_a_load_that_the_least_count_serves_is_run_once() -> None:
    idle = ProvisioningProblem(demand=np.ones(12), bin_s=10.0, mu=2.0, least=1)
    found = search(idle, Replicas(np.ones(12), idle), runs=10)
    assert [each.needs.tolist() for each in found] == [[1] * 12]


def test_a_splice_takes_each_window_from_the_run_that_is_cheaper_there() -> None:
    windows = Windows(ASKED, 0)
    few, many = np.full(BINS, 5), np.full(BINS, 10)
    missed = np.where(np.arange(BINS) < 90, 50.0, 0.0)
    tried = [
        EvaluatedSchedule(needs, ScheduleEvaluation(lost, 0.0, plan_layers(needs, 10.0, 30.0).replica_s))
        for needs, lost in ((few, missed), (many, np.zeros(BINS)))
    ]
    assert windows.splice(tried, windows.allowed).tolist() == [10] * 90 + [5] * 90
    assert windows.splice(tried, 1e9).tolist() == few.tolist()
    # Before the judged bins, misses use up nothing of the allowance.
    late = Windows(ASKED, 90)
    assert late.splice(tried, late.allowed).tolist() == few.tolist()


@pytest.mark.slow
@given(
    st.integers(1, 3).flatmap(
        lambda rows: st.lists(
            st.tuples(
                st.lists(st.integers(0, 9), min_size=rows, max_size=rows),
                st.lists(st.integers(0, 9), min_size=rows**2, max_size=rows**2),
            ),
            min_size=1,
            max_size=4,
        )
    )
)
def test_no_other_path_is_cheaper(drawn: list[tuple[list[int], list[int]]]) -> None:
    costs = np.array([column for column, _ in drawn], dtype=np.float64).T
    rows, columns = costs.shape
    changes = np.array([change for _, change in drawn[1:]], dtype=np.float64).reshape(-1, rows, rows)
    changes = changes.transpose(1, 2, 0)

    def taken(path: tuple[int, ...]) -> float:
        held = sum(costs[row, column] for column, row in enumerate(path))
        return float(held + sum(changes[path[i], path[i + 1], i] for i in range(columns - 1)))

    found = tuple(cheapest_path(costs, changes).tolist())
    assert taken(found) == min(taken(path) for path in product(range(rows), repeat=columns))
