"""Laws of the allotment, and who gets what of a budget that is short."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policy.config.deployment import Budget
from policy.scaling.budget_allocation import (
    Claim,
    allocate,
    alone,
    attainable,
    held,
    spare,
)
from policy.scaling.resources import Resources, total
from policy.scaling.view import Supply
from tests.policy.control_play import LARGE, SMALL, rung, situation

CARD = Resources(gpus=1)


def want(model: str, asked: int, **changes: Any) -> Claim:
    """So many replicas of one card each, none of which is there yet but for ``now``."""
    given: dict[str, Any] = {"priority": 0, "each": CARD, "floor": 0, "now": 0} | changes
    given.setdefault("held", Resources().plus(given["each"], given["now"]))
    return Claim(model=model, asked=asked, **given)


@st.composite
def takes(draw: st.DrawFn) -> Resources:
    gpus = draw(st.integers(0, 4))
    return Resources(
        gpus, draw(st.integers(int(not gpus), 4)), draw(st.floats(0, 900)), draw(st.floats(0, 9))
    )


@st.composite
def everybody(draw: st.DrawFn) -> tuple[list[Claim], Budget]:
    """Up to four models, and a budget that may be short of anything."""
    wants = []
    for index in range(draw(st.integers(1, 4))):
        each, now, replaces = draw(takes()), draw(st.integers(0, 4)), draw(st.booleans())
        held = draw(takes()).plus(each, 0 if replaces else now)
        asked = draw(st.integers(0, 8))
        floor = draw(st.integers(0, asked))
        priority = draw(st.integers(-1, 1))
        starved = draw(st.booleans())
        there = 0 if replaces else now
        claim = draw(st.just(Resources()) | takes())
        wants.append(Claim(f"m{index}", priority, each, asked, floor, there, held, replaces, starved, claim))
    bounds = st.none() | st.integers(0, 24)
    amounts = st.none() | st.floats(0.1, 5000)
    return wants, Budget(gpus=draw(bounds), cpus=draw(bounds), watts=draw(amounts), cost_per_h=draw(amounts))


@given(everybody())
def test_nobody_grows_beyond_what_there_is(given: tuple[list[Claim], Budget]) -> None:
    wants, budget = given
    grants = allocate(wants, budget)
    before = after = Resources()
    for each in wants:
        grant = grants[each.model]
        before = before.plus(each.held)
        if each.replaces:
            after = after.plus(each.held.most(Resources().plus(each.each, grant)))
        else:
            after = after.plus(each.held).plus(each.each, max(0, grant - each.now))
    for used, was, bound in zip(after, before, total(budget), strict=True):
        assert used <= max(was, bound) + 1e-6


@given(everybody(), st.randoms(use_true_random=False))
def test_no_claim_gets_more_than_asked_in_any_order(given: tuple[list[Claim], Budget], random: Any) -> None:
    wants, budget = given
    grants = allocate(wants, budget)
    assert all(0 <= grants[each.model] <= each.asked for each in wants)
    random.shuffle(wants)
    assert allocate(wants, budget) == grants


@given(everybody())
def test_without_bounds_everybody_gets_everything(given: tuple[list[Claim], Budget]) -> None:
    wants, _ = given
    assert allocate(wants, Budget()) == {each.model: each.asked for each in wants}


@given(everybody(), st.integers(0, 8))
def test_a_lower_priority_takes_nothing_from_a_higher(given: tuple[list[Claim], Budget], more: int) -> None:
    wants, budget = given
    top = max(each.priority for each in wants)
    wants = [each._replace(starved=each.starved or each.priority == top) for each in wants]
    greedy = [each if each.priority == top else each._replace(asked=each.asked + more) for each in wants]
    before, after = allocate(wants, budget), allocate(greedy, budget)
    assert all(before[each.model] == after[each.model] for each in wants if each.priority == top)


@given(everybody())
def test_nobody_falls_below_a_floor_that_fits(given: tuple[list[Claim], Budget]) -> None:
    wants, budget = given
    floors = Resources()
    for each in wants:
        floors = floors.plus(each.each, each.floor)
    # Whatever watts and money there are.
    if floors.gpus <= total(budget).gpus and floors.cpus <= total(budget).cpus:
        grants = allocate(wants, budget)
        assert all(grants[each.model] >= min(each.floor, each.now) for each in wants if not each.replaces)


def test_a_lower_priority_shrinks_to_its_floor_first_and_then_the_higher_grows() -> None:
    low = want("low", 6, now=6, floor=2, priority=-1)
    high = want("high", 5, now=2, floor=1)
    # A wish of the moment takes nothing that is in use.
    assert allocate([low, high], Budget(gpus=8)) == {"low": 6, "high": 2}
    high = high._replace(starved=True)
    assert allocate([low, high], Budget(gpus=8)) == {"low": 3, "high": 2}
    # Three of the lower ones drain: they hold their cards until they are gone.
    low = low._replace(now=3)
    assert allocate([low, high], Budget(gpus=8)) == {"low": 3, "high": 2}
    assert allocate([low._replace(held=Resources(gpus=3)), high], Budget(gpus=8)) == {"low": 3, "high": 5}


@given(everybody())
def test_a_claim_takes_only_of_lower_priorities(given: tuple[list[Claim], Budget]) -> None:
    wants, budget = given
    claims = [each.priority for each in wants if any(each.reserve)]
    before, after = (
        allocate([each._replace(reserve=Resources()) for each in wants], budget),
        allocate(wants, budget),
    )
    for each in wants:
        if each.priority >= max(claims, default=-9):
            assert after[each.model] == before[each.model]


def test_floors_come_first_and_by_priority_where_not_even_they_fit() -> None:
    wants = [want("low", 4, floor=2, priority=-1), want("high", 8, floor=2, starved=True)]
    assert allocate(wants, Budget(gpus=8)) == {"low": 2, "high": 6}
    assert allocate(wants, Budget(gpus=3)) == {"low": 1, "high": 2}


def test_equals_take_nothing_of_each_other_and_share_the_rest_by_need() -> None:
    first, second = want("a", 6, now=5), want("b", 6, now=1)
    assert allocate([first, second], Budget(gpus=8)) == {"a": 5, "b": 3}
    # Both begin with nothing: whoever lacks the larger part is next.
    assert allocate([want("a", 6), want("b", 3)], Budget(gpus=6)) == {"a": 4, "b": 2}


def test_watts_and_money_bind_like_cards() -> None:
    each = Resources(gpus=1, watts=300, cost_per_h=2.5)
    assert allocate([want("a", 8, each=each)], Budget(gpus=8, watts=1000)) == {"a": 3}
    assert allocate([want("a", 8, each=each)], Budget(gpus=8, cost_per_h=5)) == {"a": 2}
    assert allocate([want("a", 8, each=Resources(gpus=1, watts=0.1))], Budget(watts=0.3)) == {"a": 3}


def test_a_budget_that_was_cut_takes_what_is_over_it() -> None:
    assert allocate([want("a", 8, now=8)], Budget(gpus=4)) == {"a": 4}
    assert allocate([want("a", 8, now=4), want("b", 8, now=4)], Budget(gpus=4)) == {"a": 2, "b": 2}


def test_watts_and_money_take_nobody_that_runs_below_its_floor() -> None:
    for each, short in (
        (Resources(gpus=1, watts=2560), Budget(gpus=8, watts=2500)),
        (Resources(gpus=1, cost_per_h=5), Budget(gpus=8, cost_per_h=4)),
    ):
        assert allocate([want("a", 3, each=each, now=1, floor=1)], short) == {"a": 1}
        assert allocate([want("a", 3, each=each, now=3, floor=1)], short) == {"a": 1}
        assert allocate([want("a", 3, each=each, now=1, floor=2)], short) == {"a": 1}
        assert allocate([want("a", 3, each=each, floor=1)], short) == {"a": 0}
        low, high = want("low", 2, each=each, now=2, floor=1), want("high", 2, each=each, floor=1, priority=1)
        assert allocate([low, high], short) == {"low": 1, "high": 0}
    # Cards that are not there cannot be kept.
    assert allocate([want("a", 3, now=3, floor=2)], Budget(gpus=1)) == {"a": 1}


def test_a_switch_counts_what_makes_way_for_it() -> None:
    large = Resources(gpus=8)
    other = want("b", 2, now=2)
    assert allocate([want("a", 8, held=large, replaces=True), other], Budget(gpus=10)) == {"a": 8, "b": 2}
    assert allocate([want("a", 8, held=large, replaces=True), other], Budget(gpus=9)) == {"a": 7, "b": 2}
    # What is promised to a switch is nobody else's.
    moves, grows = want("a", 10, held=large, replaces=True, priority=1), want("b", 4, now=2)
    assert allocate([moves, grows], Budget(gpus=13)) == {"a": 10, "b": 3}


def test_what_a_model_holds_counts_leaving_replicas_of_other_shapes_too() -> None:
    given = situation(
        count=3,
        rungs=(SMALL, LARGE),
        supply=Supply(wanted=3, serving=2, starting_s=(5.0,), draining=1),
        leaving={LARGE.mode: 1},
    )
    assert held(given) == Resources(gpus=4 * SMALL.gpus + LARGE.gpus)
    # An older generation of the same shape holds its cards until it has left.
    renewed = situation(count=2, settled=False, leaving={SMALL.mode: 2})
    assert held(renewed) == Resources(gpus=4)
    # Nothing runs yet of what is aimed for, but it is spoken for.
    assert held(situation(count=3, supply=Supply(wanted=1))) == Resources(gpus=3)


def test_the_reach_of_a_model_goes_down_to_the_floors_of_lower_priorities() -> None:
    wants = {
        each.model: each
        for each in (want("low", 4, now=4, floor=1, priority=-1), want("a", 2, now=2), want("b", 3, now=3))
    }
    assert attainable("a", wants, Budget(gpus=12)).gpus == 12 - 3 - 1
    assert attainable("low", wants, Budget(gpus=12)).gpus == 12 - 2 - 3
    assert alone("a", wants, Budget(gpus=12)).gpus == 12 - 4 - 3
    assert spare(wants.values(), Budget(gpus=12)).gpus == 3


def test_cores_may_be_claimed_twice_during_a_switch() -> None:
    cores = rung("two-cores", gpus=0, cpus=2, of="cpu-smollm2-135m")
    given = situation(mode="two-cores", rungs=(cores,))
    mine = want("chat", 1, each=Resources(cpus=2), now=1, held=held(given))
    assert spare([mine], Budget(cpus=2)).cpus == 2
