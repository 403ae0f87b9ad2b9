"""Invariants of decisions for any policy, and their replay from the journal."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.control import ScaleConfig, SloConfig
from policy.config.deployment import ResourceBudget
from policy.scaling.decide import ModelPolicies, decide_all, workload_of
from policy.scaling.decision_types import Decision, DecisionMemory, ModeOverride, Situation
from policy.scaling.policies.registry import NAMES, choose, make
from policy.scaling.view import Supply
from policy.signals.types import PriorityShares, Rates, Shares, Signals
from policy.types import Priority
from tests.policy import control_play as play
from tests.policy.control_play import decide, demand, figures, mode_option, replayed, situation


def builtin(name: str = "predictive", shadow: str | None = None) -> ModelPolicies:
    """A built-in policy with default settings, beside all others."""
    return ModelPolicies(
        live=make(choose("policy", name)),
        shadow=None if shadow is None else make(choose("shadow", shadow)),
        others={other: make(choose("policy", other)) for other in NAMES},
    )


loads = st.floats(0, 20) | st.just(0.0)
levels = st.builds(Rates, last_6_s=loads, last_20_s=loads, last_60_s=loads, last_600_s=loads)
demands = st.builds(
    demand,
    st.just(0.0),
    age_s=st.floats(0, 30),
    arrivals=levels,
    concurrency=levels,
    queued=st.integers(0, 300),
    input_tokens=st.floats(0, 8000),
    output_tokens=st.floats(0, 2000),
    hit=st.floats(0, 1),
    idle_s=st.floats(0, 1000),
)
objectives = st.sampled_from([SloConfig(), play.QUICK, SloConfig(itl_p95_s=1e-4), SloConfig(ttft_p95_s=10.0)])
scales = st.builds(
    ScaleConfig,
    max_step_up=st.floats(0.1, 4),
    max_step_down=st.floats(0.05, 1),
    hold_s=st.just("auto") | st.floats(1, 300),
    min_healthy=st.integers(0, 4),
    zero_after_s=st.none() | st.floats(1, 900),
    standby=st.floats(0, 1),
)


@st.composite
def situations(draw: st.DrawFn, model: str = "chat") -> Situation:
    """Any situation, consistent or not."""
    least = draw(st.integers(0, 2))
    mode_options = (
        mode_option(play.SMALL.mode, least=least, most=draw(st.integers(max(1, least), 9))),
        play.LARGE,
    )
    count = draw(st.integers(0, 10))
    serving = draw(st.integers(0, count))
    starting = draw(st.lists(st.floats(0, 60), max_size=count - serving))
    lows = draw(st.dictionaries(st.integers(0, 9), st.floats(0, 300), max_size=4))
    leaving = draw(st.just({}) | st.just({play.LARGE.mode: 1}))
    return situation(
        model=model,
        count=count,
        priority=draw(st.integers(-1, 1)),
        settled=draw(st.booleans()) and not leaving,
        leaving=leaving,
        mode_options=draw(st.sampled_from([mode_options, mode_options[:1]])),
        supply=Supply(
            wanted=count,
            serving=serving,
            starting_s=tuple(starting),
            draining=draw(st.integers(0, 2)),
            failures=draw(st.sampled_from([0, 0, 0, 1, 3])),
        ),
        signals=Signals(
            demand=draw(st.none() | demands),
            replicas=figures(draw(st.integers(0, count)), draw(st.floats(0, 20))),
        ),
        slo=draw(objectives),
        scale=draw(scales),
        memory=DecisionMemory(
            low_since={low: play.NOON - ago for low, ago in lows.items()},
            better_since={play.LARGE.mode: play.NOON - draw(st.floats(0, 900))},
            switched_at=draw(st.none() | st.floats(play.NOON - 900, play.NOON)),
        ),
    )


def numbers(value: Any) -> list[float]:
    """All numbers in ``value``, at any depth."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    if isinstance(value, list | tuple):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def bounds(given: Situation) -> tuple[int, int]:
    """The bounds of one step."""
    scale, count = given.scale, given.count
    down = max(1, math.floor(scale.max_step_down * count + 1e-9))
    return count - down, count + max(1, math.ceil(scale.max_step_up * count - 1e-9))


@pytest.mark.slow
@given(situations(), st.sampled_from(NAMES))
def test_a_decision_replays_through_json_and_is_finite(given: Situation, name: str) -> None:
    chosen = builtin(name, shadow="panic_window")
    decision, memory = decide(given, chosen)
    again, kept = decide(msgspec.json.decode(msgspec.json.encode(given), type=Situation), chosen)
    assert (again, kept) == (decision, memory)
    for made, kind in ((decision, Decision), (memory, DecisionMemory)):
        assert all(math.isfinite(number) for number in numbers(msgspec.to_builtins(made)))
        logged = msgspec.json.encode(made)
        assert msgspec.json.encode(msgspec.json.decode(logged, type=kind)) == logged


@pytest.mark.slow
@given(situations(), st.integers(0, 12))
def test_a_decision_is_within_one_step(given: Situation, asked: int) -> None:
    decision = decide(given, asked)[0]
    if decision.mode == given.mode:
        low, high = bounds(given)
        assert low <= decision.count <= high


@pytest.mark.slow
@given(situations(), st.integers(0, 12))
def test_min_healthy_replicas_stay(given: Situation, asked: int) -> None:
    awake = msgspec.structs.replace(given, scale=msgspec.structs.replace(given.scale, zero_after_s=None))
    decision = decide(awake, asked)[0]
    most = next(option for option in given.mode_options if option.mode == decision.mode).most
    floor = min(max(1, given.scale.min_healthy), most)
    if decision.mode == given.mode and given.supply.failures < 3:
        assert decision.count >= min(floor, bounds(given)[1])
    elif decision.mode != given.mode:
        assert decision.count >= floor


@pytest.mark.slow
@given(situations(), st.sampled_from(["none", "old", "silent"]), st.integers(0, 12))
def test_stale_signals_neither_scale_down_nor_switch(given: Situation, how: str, asked: int) -> None:
    serving = given.supply.serving
    unseen = {
        "none": Signals(replicas=figures(serving)),
        "old": Signals(demand=demand(0.0, age_s=15.5), replicas=figures(serving)),
        "silent": Signals(demand=demand(0.0), replicas=figures(max(0, serving - 1))),
    }
    if how == "silent" and not serving:
        return
    blind = msgspec.structs.replace(given, signals=unseen[how])
    decision = decide(blind, asked)[0]
    assert decision.mode == given.mode
    # Replicas beyond a lowered maximum are removed all the same.
    assert decision.count >= min(given.count, given.mode_options[0].most)


@pytest.mark.slow
@given(st.data(), st.integers(1, 24), st.none() | st.floats(100, 9000))
def test_no_model_grows_beyond_the_budget(data: st.DataObject, gpus: int, watts: float | None) -> None:
    shared = ResourceBudget(gpus=gpus, watts=watts)
    given = {name: data.draw(situations(name)) for name in ("a", "b", "c")}
    for name, each in given.items():
        powered = tuple(msgspec.structs.replace(r, watts=300.0 * r.gpus) for r in each.mode_options)
        given[name] = msgspec.structs.replace(each, mode_options=powered)
    wants = {name: ModelPolicies(play.Fixed(data.draw(st.integers(0, 9)))) for name in given}
    made = decide_all(given, shared, wants)
    # Desired counts: the rollout waits for replicas that leave.
    for resource, bound in (("gpus", gpus), ("watts", watts)):
        before = after = 0.0
        for name, each in given.items():
            price = {r.mode: float(getattr(r, resource)) for r in each.mode_options}
            decision = made[name][0]
            before += price[each.mode] * each.count
            after += price[decision.mode] * decision.count
        assert bound is None or after <= max(bound, before) + 1e-6


@pytest.mark.slow
@given(situations(), st.floats(0, 20), st.floats(0, 20), st.sampled_from(NAMES))
def test_more_load_never_needs_fewer_replicas(given: Situation, one: float, other: float, name: str) -> None:
    counts = []
    for rate in sorted((one, other)):
        signals = Signals(demand=demand(rate, queued=int(rate)), replicas=given.signals.replicas)
        state = msgspec.structs.replace(
            given, signals=signals, mode_options=given.mode_options[:1], leaving={}
        )
        counts.append(decide(state, builtin(name))[0].count)
    assert counts[0] <= counts[1]


@pytest.mark.slow
@given(situations(), st.integers(0, 12), st.integers(0, 12), st.floats(-100, 100))
def test_an_override_lasts_until_its_end(given: Situation, asked: int, count: int, duration_s: float) -> None:
    until = play.NOON + duration_s
    override = ModeOverride(mode=given.mode, count=count, until=until)
    decision = decide(msgspec.structs.replace(given, override=override), asked)[0]
    if until <= play.NOON:
        assert decision == decide(given, asked)[0]
    else:
        here = given.mode_options[0]
        floor = max(here.least, min(max(1, given.scale.min_healthy), here.most))
        floor = 0 if count == here.least == 0 else floor
        assert (decision.mode, decision.count) == (given.mode, min(max(count, floor), here.most))


# Timelines.


def random_load(stream: Random, most: float = 1.0) -> Callable[[float], float]:
    """A rate that may change every half minute, with bursts and silence."""
    rate, found = 2.0, []
    for _ in range(60):
        if stream.random() < 0.3:
            rate = stream.choice([0.0, 0.5, 2.0, 4.0, 7.5, 12.0])
        found.append(max(0.0, rate * stream.uniform(0.7, 1.3)) * most)
    return lambda t: found[int(t // 30) % 60]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("name", ["predictive", "target_tracking"])
def test_no_flapping_under_random_load(seed: int, name: str) -> None:
    """Switches keep the dwell time, and scale-downs the scale-down delay."""
    load = random_load(Random(seed))  # noqa: S311 - loads are no secret
    model = play.Model(
        "chat", load, mode_options=play.BOTH, slo=play.QUICK, policies=ModelPolicies(builtin(name).live)
    )
    fleet = play.Fleet(model, budget=ResourceBudget(gpus=12)).run(1800)
    made = fleet.decisions("chat")
    switched = [each.at for each in made if each.mode != each.was_mode]
    assert all(later - earlier >= 300 for earlier, later in pairwise(switched))
    falls = [i for i, each in enumerate(made) if each.mode == each.was_mode and each.count < each.was_count]
    assert switched or falls
    for index in falls:
        # Twelve ticks before it make a minute.
        before, fall = made[index - 12 : index], made[index]
        assert all(each.proposal.count <= fall.count for each in before)
        assert all(each.mode == fall.mode == each.was_mode for each in before)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_models_that_share_a_budget_stay_within_it_and_replay(seed: int) -> None:
    """Three models of two priorities; each logged decision is replayed."""
    stream = Random(seed)  # noqa: S311 - loads are no secret
    budget = ResourceBudget(gpus=stream.choice([8, 10, 14]))
    models = [
        play.Model(
            name,
            random_load(stream, 0.5),
            mode_options=play.BOTH if name == "a" else (play.SMALL,),
            mode=play.SMALL.mode,
            priority=priority,
            slo=play.QUICK if name == "a" else SloConfig(),
            policies=builtin("predictive", shadow="static"),
        )
        for name, priority in (("a", 1), ("b", 0), ("c", 0))
    ]
    fleet = play.Fleet(*models, budget=budget)
    policies = {model.name: model.policies for model in models}
    for _ in range(360):
        fleet.tick()
        assert fleet.taken("gpus") <= (budget.gpus or 0)
        given, made = fleet.log[-1]
        assert all(decision.count for decision in made.values())
        assert replayed(given, budget, policies) == made


# Single decisions.


def test_each_policy_gets_its_own_memory() -> None:
    asked = ModelPolicies(
        play.Proportional(), play.Proportional(), {"a": play.Proportional(), "b": play.Fixed(7)}
    )
    given = situation(
        rate=3.0, memory=DecisionMemory(policy={"asked": 4}, shadow={"asked": 9}, others={"a": {"asked": 1}})
    )
    decision, memory = decide(given, asked)
    assert (memory.policy, memory.shadow) == ({"asked": 5}, {"asked": 10})
    assert memory.others == {"a": {"asked": 2}, "b": None}
    assert decision.others == {"a": 4, "b": 7}
    assert decision.shadow is not None and decision.shadow.count == 4
    assert (decision.count, decision.proposal.count, decision.mode) == (2, 4, play.SMALL.mode)
    assert decide(given, ModelPolicies(play.Proportional()))[0].shadow is None


def test_request_lengths_are_assumed_until_one_has_ended() -> None:
    assert workload_of(None) == workload_of(demand(1.0, input_tokens=0.0, output_tokens=0.0))
    assert (workload_of(None).input_tokens, workload_of(None).output_tokens) == (512.0, 128.0)
    workload = workload_of(demand(1.0, input_tokens=100.0, output_tokens=0.0, hit=1.0))
    assert (workload.input_tokens, workload.output_tokens) == (100.0, 1.0)
    assert workload.uncached_tokens == pytest.approx(1.0)


def test_the_reason_names_proposal_limits_and_shortage() -> None:
    given = situation(rate=6.0, count=1)
    decision, _ = decide(given, ModelPolicies(play.Proportional()), ResourceBudget(gpus=4))
    assert decision.reason == (
        "wants 7: 6.00 req/s of 0.96 each; capped at 4 by budget: the budget leaves 4;"
        " capped at 2 by step: at most 1 more per decision; 2.16 req/s over capacity"
    )
    assert decision.changes and (decision.was_count, decision.count) == (1, 2)
    assert decision.mode_forecasts == ()


def test_a_dry_run_decides_the_same() -> None:
    """Decisions are not carried out, so the scale-down delay goes on."""
    guard = msgspec.structs.replace(situation().guard, dry_run=True)
    given = situation(count=4, guard=guard)
    for tick in range(20):
        decision, memory = decide(given, 1)
        assert decision.dry_run
        assert decision.count == (4 if tick < 12 else 2)
        given = msgspec.structs.replace(given, at=given.at + 5, memory=memory)


@pytest.mark.parametrize("name", NAMES)
def test_decisions_continue_after_the_clock_was_set_back(name: str) -> None:
    """A controller starts after the clock was set back an hour, with the memory of its predecessor."""
    before = (
        play.Fleet(play.Model("chat", lambda t: 6.0, policies=builtin(name), count=8))
        .run(300)
        .models[0]
        .memory
    )
    later = msgspec.structs.replace(before, switched_at=before.at)
    fleet = play.Fleet(play.Model("chat", lambda t: 1.0, policies=builtin(name), count=8, memory=later))
    fresh = play.Fleet(play.Model("chat", lambda t: 1.0, policies=builtin(name), count=8))
    for each in (fleet, fresh):
        each.at = -3600.0
        for replica in each.models[0].replicas:
            replica.ready_at = each.at
    counts = [[made.count for made in each.run(-3000.0).decisions("chat")] for each in (fleet, fresh)]
    assert counts[0] == counts[1]
    assert fleet.models[0].memory.switched_at == play.NOON - 3600.0


def test_delays_restart_after_a_time_without_decisions() -> None:
    """Scale-down delay and mode confirmation begin again after the controller was away for an hour."""
    given = situation(count=4, mode_options=play.BOTH, slo=play.QUICK)
    _, memory = decide(given, 1)
    assert memory.low_since and memory.better_since
    back = msgspec.structs.replace(given, at=given.at + 3600, memory=memory)
    decision, after = decide(back, 1)
    assert (decision.mode, decision.count) == (play.SMALL.mode, 4)
    assert set(after.low_since.values()) == set(after.better_since.values()) == {back.at}
    soon = msgspec.structs.replace(given, at=given.at + 15, memory=memory)
    assert set(decide(soon, 1)[1].low_since.values()) == {given.at}


def test_a_decision_names_the_priority_that_misses_its_slo() -> None:
    slos = {Priority.CRITICAL: SloConfig(ttft_p95_s=0.5), Priority.BATCH: SloConfig(ttft_p95_s=30.0)}
    shares = {
        Priority.CRITICAL: PriorityShares(judged=100, met=Shares(ttft=0.91)),
        Priority.BATCH: PriorityShares(judged=900, met=Shares(ttft=0.96)),
    }
    signals = Signals(demand=demand(1.0, by_priority=shares), replicas=figures(1))
    reason = decide(situation(slo_by_priority=slos, signals=signals), 1)[0].reason
    assert reason == "SLO of critical missed: TTFT within 500 ms for 91% < 95%; wants 1: 1 wanted"
