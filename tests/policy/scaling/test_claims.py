"""A mode switch that needs resources of a lower priority: when they are released and when not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.control import GuardConfig
from policy.config.deployment import ResourceBudget
from policy.engine.replica_capacity import capability
from policy.scaling.budget_resources import Resources
from policy.scaling.decide import STARVED_S, ModelPolicies, decide_all, workload_of
from policy.scaling.decision_types import Decision, DecisionMemory, ModeOverride, Situation
from policy.scaling.policies.registry import choose, make
from policy.scaling.replica_size_mode_selection import ModeComparison, ModeSelection
from policy.scaling.view import Supply
from tests.policy import control_play as play
from tests.policy.control_play import demand, figures, mode_option, replayed, situation

RISE = 300.0


def shared(gpus: int, low: int, *, priority: int = 1) -> play.Fleet:
    """A model that switches when its load rises, beside one that always wants ``low`` GPUs."""
    high = play.Model(
        "high",
        lambda t: 7.0 if t >= RISE else 2.0,
        mode_options=play.BOTH,
        mode=play.LARGE.mode,
        priority=priority,
        slo=play.QUICK,
        policies=ModelPolicies(make(choose("policy", "predictive"))),
    )
    other = play.Model("low", lambda t: 0.0, policies=ModelPolicies(play.Fixed(low)), count=low)
    return play.Fleet(high, other, budget=ResourceBudget(gpus=gpus))


def until(fleet: play.Fleet, there: Callable[[Decision, Decision], bool]) -> play.Fleet:
    """Run until ``there`` holds for both decisions, then keep the mode by an override."""
    while not fleet.log or not there(fleet.decisions("high")[-1], fleet.decisions("low")[-1]):
        fleet.tick()
        assert fleet.at < 600
    fleet.models[0].override = lambda at: ModeOverride(mode=play.LARGE.mode)
    return fleet


@pytest.mark.parametrize(("gpus", "low", "left"), [(12, 6, 4), (9, 5, 1)])
def test_a_lower_priority_shrinks_for_a_confirmed_switch(gpus: int, low: int, left: int) -> None:
    fleet = shared(gpus, low)
    policies = {model.name: model.policies for model in fleet.models}
    while fleet.at < 480:
        fleet.tick()
        given, made = fleet.log[-1]
        assert fleet.taken("gpus") <= gpus
        assert made["low"].count >= 1
        assert replayed(given, fleet.budget, policies) == made
    high, lows = fleet.decisions("high"), fleet.decisions("low")
    waited = next(each for each in high if "waits: it needs" in each.reason)
    shrank = next(each for each in lows if each.count < low)
    switched = next(each for each in high if each.mode != each.was_mode)
    # First the hysteresis, then the wait of any starved count, then the drain of the other model.
    assert waited.at - play.NOON >= RISE + 60
    assert shrank.at == waited.at + STARVED_S
    assert "lower priorities are scaled down" in next(each.reason for each in high if each.at == shrank.at)
    assert shrank.at < switched.at <= shrank.at + 25
    assert (switched.mode, switched.count) == (play.SMALL.mode, 8)
    assert all(each.mode == play.SMALL.mode for each in high if each.at >= switched.at)
    assert lows[-1].count == left


def test_resources_claimed_for_an_abandoned_switch_are_returned() -> None:
    fleet = until(shared(12, 6), lambda high, low: low.count < 6)
    fleet.run(fleet.at + 60)
    assert fleet.decisions("low")[-1].count == 6
    assert {each.mode for each in fleet.decisions("high")} == {play.LARGE.mode}


def waiting(**changes: Any) -> dict[str, Situation]:
    """Both models at the instant at which the switch has waited long enough."""
    memory = DecisionMemory(
        at=play.NOON - 5, better_since={play.SMALL.mode: play.NOON - 100}, waits_since=play.NOON - STARVED_S
    )
    high = situation(
        model="high",
        rate=7.0,
        priority=1,
        mode=play.LARGE.mode,
        mode_options=play.BOTH,
        slo=play.QUICK,
        signals=msgspec.structs.replace(situation(7.0).signals, demand=demand(7.0, queued=120)),
        memory=memory,
    )
    low = situation(model="low", count=6)
    return {"high": msgspec.structs.replace(high, **changes), "low": low}


def both(given: dict[str, Situation], gpus: int = 12) -> tuple[int, DecisionMemory]:
    """The count of the lower priority and the memory of the higher one."""
    policies = {
        "high": ModelPolicies(make(choose("policy", "predictive"))),
        "low": ModelPolicies(play.Fixed(6)),
    }
    made = decide_all(given, ResourceBudget(gpus=gpus), policies)
    assert made["high"][0].mode == play.LARGE.mode
    return made["low"][0].count, made["high"][1]


def test_only_a_switch_that_would_be_made_claims_after_its_wait() -> None:
    left, memory = both(waiting())
    assert (left, memory.waits_since) == (4, play.NOON - STARVED_S)
    assert both(waiting(guard=GuardConfig(dry_run=True)))[0] == 6
    early = msgspec.structs.replace(waiting()["high"].memory, waits_since=play.NOON - STARVED_S + 0.1)
    assert both(waiting(memory=early))[0] == 6
    # A wait is not continued over a time without decisions.
    away = msgspec.structs.replace(waiting()["high"].memory, at=play.NOON - 3600)
    left, memory = both(waiting(memory=away))
    assert (left, memory.waits_since) == (6, None)


@given(st.data(), st.integers(5, 20), st.integers(0, 4), st.integers(1, 8), st.floats(0, 60))
def test_floors_are_kept(data: st.DataObject, gpus: int, healthy: int, count: int, waited_s: float) -> None:
    rate, queued = data.draw(st.floats(0, 12)), data.draw(st.integers(0, 200))
    gap_s = data.draw(st.sampled_from([0.0, 20.0, 90.0]))
    given_both = waiting(
        signals=msgspec.structs.replace(situation(rate).signals, demand=demand(rate, queued=queued)),
        mode_options=(play.LARGE, mode_option(play.SMALL.mode, gap_s=gap_s)),
        memory=DecisionMemory(
            at=play.NOON - 5,
            better_since={play.SMALL.mode: play.NOON - 100},
            waits_since=play.NOON - waited_s,
            starved_since=play.NOON,
        ),
    )
    low = situation(model="low", count=count)
    given_both["low"] = msgspec.structs.replace(
        low, scale=msgspec.structs.replace(low.scale, min_healthy=healthy, max_step_down=1.0)
    )
    chosen = {
        "high": ModelPolicies(make(choose("policy", "predictive"))),
        "low": ModelPolicies(play.Fixed(count)),
    }
    made = decide_all(given_both, ResourceBudget(gpus=gpus), chosen)
    floor, there = min(count, max(1, healthy)), min(count, gpus - play.LARGE.gpus)
    assert made["low"][0].count >= min(floor, there)
    if waited_s < STARVED_S:
        assert made["low"][0].count >= there


def test_capacity_during_a_switch_counts_resources_to_be_released() -> None:
    """Four small replicas keep up but miss the SLO; two of them alone would not keep up."""
    large = mode_option("two-cards", gpus=2, most=4)
    given = situation(
        count=4,
        mode_options=(play.SMALL, large),
        slo=play.QUICK,
        supply=Supply(wanted=4, serving=4),
        signals=msgspec.structs.replace(situation(3.7).signals, replicas=figures(4)),
        memory=DecisionMemory(better_since={large.mode: play.NOON - 100}),
    )
    able = {r.mode: capability(r.timing, workload_of(demand(3.7)), given.slo) for r in given.mode_options}

    def seen(alone: float, spare: float, reach: float = 8.0) -> ModeSelection:
        return ModeComparison(
            situation=given,
            rate=3.7,
            during=lambda seconds: 3.7,
            workload=workload_of(demand(3.7)),
            capabilities=able,
            reach=Resources(reach, math.inf, math.inf, math.inf),
            alone=Resources(alone, math.inf, math.inf, math.inf),
            spare=Resources(spare, math.inf, math.inf, math.inf),
        ).evaluate()

    now = seen(alone=8.0, spare=4.0)
    assert (now.to and now.to.mode, now.early) == (large.mode, False)
    later = seen(alone=4.0, spare=0.0)
    assert (later.to and later.to.mode, later.early, later.gain) == (large.mode, True, now.gain)
    assert "can be served during the switch" in later.mode_forecasts[1].why
    # No lower priority holds anything: the missing resources are unattainable.
    assert seen(alone=4.0, spare=0.0, reach=4.0).to is None
