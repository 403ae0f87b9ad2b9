"""Invariants of the allocation, and how a short budget is divided."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.deployment import ResourceBudget
from policy.scaling.budget_allocation import BudgetClaim, allocate, alone, attainable, held, spare
from policy.scaling.budget_resources import Resources, total
from policy.scaling.view import Supply
from tests.policy.control_play import LARGE, SMALL, mode_option, situation

CARD = Resources(gpus=1)


def claim(model: str, asked: int, **changes: Any) -> BudgetClaim:
    """A claim of ``asked`` replicas with one GPU each, of which ``now`` exist."""
    given: dict[str, Any] = {"priority": 0, "each": CARD, "floor": 0, "now": 0} | changes
    given.setdefault("held", Resources().plus(given["each"], given["now"]))
    return BudgetClaim(model=model, asked=asked, **given)


@st.composite
def resources(draw: st.DrawFn) -> Resources:
    gpus = draw(st.integers(0, 4))
    return Resources(
        gpus, draw(st.integers(int(not gpus), 4)), draw(st.floats(0, 900)), draw(st.floats(0, 9))
    )


@st.composite
def claims_and_budget(draw: st.DrawFn) -> tuple[list[BudgetClaim], ResourceBudget]:
    """Claims of up to four models, and a budget that may be short of any resource."""
    claims = []
    for i in range(draw(st.integers(1, 4))):
        each, now, replaces = draw(resources()), draw(st.integers(0, 4)), draw(st.booleans())
        held = draw(resources()).plus(each, 0 if replaces else now)
        asked = draw(st.integers(0, 8))
        floor = draw(st.integers(0, asked))
        priority = draw(st.integers(-1, 1))
        starved = draw(st.booleans())
        there = 0 if replaces else now
        reserve = draw(st.just(Resources()) | resources())
        claims.append(
            BudgetClaim(f"m{i}", priority, each, asked, floor, there, held, replaces, starved, reserve)
        )
    bounds = st.none() | st.integers(0, 24)
    amounts = st.none() | st.floats(0.1, 5000)
    return claims, ResourceBudget(
        gpus=draw(bounds), cpus=draw(bounds), watts=draw(amounts), cost_per_h=draw(amounts)
    )


@pytest.mark.slow
@given(claims_and_budget())
def test_no_model_grows_beyond_the_free_resources(given: tuple[list[BudgetClaim], ResourceBudget]) -> None:
    claims, budget = given
    grants = allocate(claims, budget)
    before = after = Resources()
    for each in claims:
        grant = grants[each.model]
        before = before.plus(each.held)
        if each.replaces:
            after = after.plus(each.held.most(Resources().plus(each.each, grant)))
        else:
            after = after.plus(each.held).plus(each.each, max(0, grant - each.now))
    for used, was, bound in zip(after, before, total(budget), strict=True):
        assert used <= max(was, bound) + 1e-6


@pytest.mark.slow
@given(claims_and_budget(), st.randoms(use_true_random=False))
def test_no_claim_gets_more_than_asked_in_any_order(
    given: tuple[list[BudgetClaim], ResourceBudget], random: Any
) -> None:
    claims, budget = given
    grants = allocate(claims, budget)
    assert all(0 <= grants[each.model] <= each.asked for each in claims)
    random.shuffle(claims)
    assert allocate(claims, budget) == grants


@pytest.mark.slow
@given(claims_and_budget())
def test_without_bounds_every_claim_is_granted_in_full(
    given: tuple[list[BudgetClaim], ResourceBudget],
) -> None:
    claims, _ = given
    assert allocate(claims, ResourceBudget()) == {each.model: each.asked for each in claims}


@pytest.mark.slow
@given(claims_and_budget(), st.integers(0, 8))
def test_a_lower_priority_takes_nothing_from_a_higher(
    given: tuple[list[BudgetClaim], ResourceBudget], more: int
) -> None:
    claims, budget = given
    top = max(each.priority for each in claims)
    claims = [each._replace(starved=each.starved or each.priority == top) for each in claims]
    increased = [each if each.priority == top else each._replace(asked=each.asked + more) for each in claims]
    before, after = allocate(claims, budget), allocate(increased, budget)
    assert all(before[each.model] == after[each.model] for each in claims if each.priority == top)


@pytest.mark.slow
@given(claims_and_budget())
def test_no_model_falls_below_a_floor_that_fits(given: tuple[list[BudgetClaim], ResourceBudget]) -> None:
    claims, budget = given
    floors = Resources()
    for each in claims:
        floors = floors.plus(each.each, each.floor)
    # Independent of power and cost.
    if floors.gpus <= total(budget).gpus and floors.cpus <= total(budget).cpus:
        grants = allocate(claims, budget)
        assert all(grants[each.model] >= min(each.floor, each.now) for each in claims if not each.replaces)


def test_a_lower_priority_shrinks_to_its_floor_first_and_then_the_higher_grows() -> None:
    low = claim("low", 6, now=6, floor=2, priority=-1)
    high = claim("high", 5, now=2, floor=1)
    # A claim that is not starved takes no resources in use.
    assert allocate([low, high], ResourceBudget(gpus=8)) == {"low": 6, "high": 2}
    high = high._replace(starved=True)
    assert allocate([low, high], ResourceBudget(gpus=8)) == {"low": 3, "high": 2}
    # Three replicas of the lower priority drain: they hold their GPUs until they have ended.
    low = low._replace(now=3)
    assert allocate([low, high], ResourceBudget(gpus=8)) == {"low": 3, "high": 2}
    assert allocate([low._replace(held=Resources(gpus=3)), high], ResourceBudget(gpus=8)) == {
        "low": 3,
        "high": 5,
    }


@pytest.mark.slow
@given(claims_and_budget())
def test_a_reserve_takes_from_lower_priorities_only(given: tuple[list[BudgetClaim], ResourceBudget]) -> None:
    claims, budget = given
    priorities = [each.priority for each in claims if any(each.reserve)]
    before, after = (
        allocate([each._replace(reserve=Resources()) for each in claims], budget),
        allocate(claims, budget),
    )
    for each in claims:
        if each.priority >= max(priorities, default=-9):
            assert after[each.model] == before[each.model]


def test_floors_come_first_and_are_granted_by_priority() -> None:
    claims = [claim("low", 4, floor=2, priority=-1), claim("high", 8, floor=2, starved=True)]
    assert allocate(claims, ResourceBudget(gpus=8)) == {"low": 2, "high": 6}
    assert allocate(claims, ResourceBudget(gpus=3)) == {"low": 1, "high": 2}


def test_equal_priorities_keep_their_own_and_share_the_rest_by_need() -> None:
    first, second = claim("a", 6, now=5), claim("b", 6, now=1)
    assert allocate([first, second], ResourceBudget(gpus=8)) == {"a": 5, "b": 3}
    # Both begin with none: the one that lacks the larger fraction is next.
    assert allocate([claim("a", 6), claim("b", 3)], ResourceBudget(gpus=6)) == {"a": 4, "b": 2}


def test_watts_and_cost_limit_like_gpus() -> None:
    each = Resources(gpus=1, watts=300, cost_per_h=2.5)
    assert allocate([claim("a", 8, each=each)], ResourceBudget(gpus=8, watts=1000)) == {"a": 3}
    assert allocate([claim("a", 8, each=each)], ResourceBudget(gpus=8, cost_per_h=5)) == {"a": 2}
    assert allocate([claim("a", 8, each=Resources(gpus=1, watts=0.1))], ResourceBudget(watts=0.3)) == {"a": 3}


def test_a_reduced_budget_removes_the_excess() -> None:
    assert allocate([claim("a", 8, now=8)], ResourceBudget(gpus=4)) == {"a": 4}
    assert allocate([claim("a", 8, now=4), claim("b", 8, now=4)], ResourceBudget(gpus=4)) == {"a": 2, "b": 2}


def test_watts_and_cost_stop_no_running_replica_of_the_floor() -> None:
    for each, short in (
        (Resources(gpus=1, watts=2560), ResourceBudget(gpus=8, watts=2500)),
        (Resources(gpus=1, cost_per_h=5), ResourceBudget(gpus=8, cost_per_h=4)),
    ):
        assert allocate([claim("a", 3, each=each, now=1, floor=1)], short) == {"a": 1}
        assert allocate([claim("a", 3, each=each, now=3, floor=1)], short) == {"a": 1}
        assert allocate([claim("a", 3, each=each, now=1, floor=2)], short) == {"a": 1}
        assert allocate([claim("a", 3, each=each, floor=1)], short) == {"a": 0}
        high = claim("high", 2, each=each, floor=1, priority=1)
        assert allocate([claim("low", 2, each=each, now=2, floor=1), high], short) == {"low": 1, "high": 0}
    # Missing GPUs cannot be kept.
    assert allocate([claim("a", 3, now=3, floor=2)], ResourceBudget(gpus=1)) == {"a": 1}


def test_a_switch_counts_the_replicas_that_it_replaces() -> None:
    large = Resources(gpus=8)
    other = claim("b", 2, now=2)
    assert allocate([claim("a", 8, held=large, replaces=True), other], ResourceBudget(gpus=10)) == {
        "a": 8,
        "b": 2,
    }
    assert allocate([claim("a", 8, held=large, replaces=True), other], ResourceBudget(gpus=9)) == {
        "a": 7,
        "b": 2,
    }
    # Resources granted to a switch are not granted to others.
    switching, growing = claim("a", 10, held=large, replaces=True, priority=1), claim("b", 4, now=2)
    assert allocate([switching, growing], ResourceBudget(gpus=13)) == {"a": 10, "b": 3}


def test_held_resources_include_leaving_replicas_of_other_shapes() -> None:
    given = situation(
        count=3,
        mode_options=(SMALL, LARGE),
        supply=Supply(wanted=3, serving=2, starting_s=(5.0,), draining=1),
        leaving={LARGE.mode: 1},
    )
    assert held(given) == Resources(gpus=4 * SMALL.gpus + LARGE.gpus)
    # An older generation of the same shape holds its GPUs until it has left.
    renewed = situation(count=2, settled=False, leaving={SMALL.mode: 2})
    assert held(renewed) == Resources(gpus=4)
    # Replicas that do not run yet are held as well.
    assert held(situation(count=3, supply=Supply(wanted=1))) == Resources(gpus=3)


def test_attainable_resources_exclude_the_floors_of_lower_priorities() -> None:
    claims = {
        each.model: each
        for each in (claim("low", 4, now=4, floor=1, priority=-1), claim("a", 2, now=2), claim("b", 3, now=3))
    }
    assert attainable("a", claims, ResourceBudget(gpus=12)).gpus == 12 - 3 - 1
    assert attainable("low", claims, ResourceBudget(gpus=12)).gpus == 12 - 2 - 3
    assert alone("a", claims, ResourceBudget(gpus=12)).gpus == 12 - 4 - 3
    assert spare(claims.values(), ResourceBudget(gpus=12)).gpus == 3


def test_cores_may_be_claimed_twice_during_a_switch() -> None:
    cores = mode_option("two-cores", gpus=0, cpus=2, of="cpu-smollm2-135m")
    given = situation(mode="two-cores", mode_options=(cores,))
    mine = claim("chat", 1, each=Resources(cpus=2), now=1, held=held(given))
    assert spare([mine], ResourceBudget(cpus=2)).cpus == 2
