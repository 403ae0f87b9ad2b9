"""Schedules, spare replicas, rates and the scale-up delay: what holds whatever the policy says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.config.control import ScaleConfig, ScalingRateLimit, ScalingSchedule
from policy.scaling.decide import ModelPolicies
from policy.scaling.decision_types import Decision, DecisionMemory, Guardrail, ModeOverride, Situation
from policy.scaling.policies.registry import choose, make
from policy.signals.types import Signals
from tests.policy import control_play as play
from tests.policy.control_play import decide, demand, figures, mode_option, rates, situation

# From Monday to Friday between 8 and 18 o'clock. 1970-01-05 was a Monday.
WORK = {"start": "0 8 * * mon-fri", "end": "0 18 * * mon-fri", "timezone": "Europe/Berlin"}
MONDAY_S = 4 * 86_400.0


def at_hour(hour: float, *schedules: ScalingSchedule, count: int = 1, **changes: Any) -> Situation:
    """``hour`` of a week in Berlin."""
    clocks = {"Europe/Berlin": MONDAY_S + 3600.0 * hour}
    given: dict[str, Any] = {"scale": ScaleConfig(schedules=schedules), "wall_clocks": clocks}
    return situation(count=count, **(given | changes))


@pytest.mark.parametrize(
    ("hour", "count"), [(7.99, 1), (8.0, 4), (17.99, 4), (18.0, 1), (32.0, 4), (4 * 24 + 19, 1), (128.0, 1)]
)
def test_a_schedule_applies_from_its_start_to_its_end(hour: float, count: int) -> None:
    decision = decide(at_hour(hour, ScalingSchedule(**WORK, min=4)), 1)[0]
    assert decision.count == count
    shown = [(each.rule, each.why) for each in decision.applied_guardrails]
    assert shown == [(Guardrail.SCHEDULE, "scale.schedules[0] has at least 4")] * (count == 4)


@given(st.tuples(st.integers(0, 8), st.integers(0, 12), st.integers(0, 6), st.integers(1, 8)), st.booleans())
def test_a_floor_and_a_ceiling_hold_whatever_the_policy_says(
    numbers: tuple[int, int, int, int], by_hand: bool
) -> None:
    count, asked, least, most = numbers
    bounds = ScalingSchedule(**WORK, min=least, max=max(most, least))
    scale = ScaleConfig(
        schedules=(bounds,), max_step_up=0.1, max_step_down=0.1, hold_s=900.0, hold_up_s=900.0,
        rates_up=(ScalingRateLimit(period_s=60, replicas=0),), rates_down=(ScalingRateLimit(period_s=60,
            replicas=0),),
        zero_after_s=1.0, spare=1,
    )  # fmt: skip
    idle = demand(0.0, idle_s=900.0, concurrency=rates(0.0))
    given = at_hour(
        12, count=count, scale=scale, mode_options=(mode_option(play.SMALL.mode, least=0),),
        signals=Signals(demand=idle, replicas=figures(count, running=0)),
        override=ModeOverride(mode=play.SMALL.mode, count=asked) if by_hand else None,
    )  # fmt: skip
    decision = decide(given, asked)[0]
    assert least <= decision.count <= max(most, least)


def test_of_overlapping_schedules_the_highest_floor_and_the_lowest_ceiling_apply() -> None:
    both = (ScalingSchedule(**WORK, min=2, max=7), ScalingSchedule(**WORK, min=3, max=6))
    assert decide(at_hour(9, *both), 0)[0].count == 3
    assert decide(at_hour(9, *both, count=8), 9)[0].count == 6
    # A mode with fewer replicas is bounded by its own.
    large = at_hour(9, ScalingSchedule(**WORK, min=3), mode=play.LARGE.mode, mode_options=(play.LARGE,))
    assert decide(large, 1)[0].count == 1


def test_the_bound_that_a_policy_applies_itself_is_shown() -> None:
    policy = ModelPolicies(make(choose("policy", {"static": {"replicas": 1}})))
    decision = decide(at_hour(9, ScalingSchedule(**WORK, min=4)), policy)[0]
    assert (decision.count, decision.applied_guardrails) == (4, ())
    assert (
        decision.reason == "wants 1: 1 configured; raised to 4 by schedule: scale.schedules[0] has at least 4"
    )


# Spare replicas.


@pytest.mark.parametrize(
    "policy",
    [{"static": {"replicas": 2}}, "target_tracking", "panic_window", "token_saturation", "predictive"],
)
def test_spare_replicas_are_kept_beyond_the_need(policy: object) -> None:
    def settled(spare: int) -> int:
        policies = ModelPolicies(make(choose("policy", policy)))
        model = play.Model("chat", lambda t: 0.7, policies=policies, scale=ScaleConfig(spare=spare), count=6)
        return play.Fleet(model).run(600).decisions("chat")[-1].count

    assert settled(2) == settled(0) + 2


def test_a_spare_replica_has_its_reason() -> None:
    decision = decide(situation(count=2, scale=ScaleConfig(spare=1)), 2)[0]
    assert (decision.count, decision.proposal.count) == (3, 2)
    why = "scale.spare keeps 1 ready beyond the need"
    assert decision.reason == f"wants 2: 2 wanted; raised to 3 by spare: {why}"
    assert decide(situation(count=8, scale=ScaleConfig(spare=1)), 8)[0].count == 8


# Rates.


def changes(decisions: list[Decision], sign: int) -> list[tuple[float, int]]:
    return [(each.at, max(0, sign * (each.count - each.was_count))) for each in decisions]


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(st.sampled_from([0.2, 1.0, 3.0, 6.0]), min_size=3, max_size=5), st.integers(1, 3))
def test_a_rate_bounds_every_window_of_its_period(loads: list[float], most: int) -> None:
    scale = ScaleConfig(
        max_step_up=100, max_step_down=1.0, hold_s=1.0,
        rates_up=(ScalingRateLimit(period_s=60, replicas=most),), rates_down=(ScalingRateLimit(period_s=90,
            replicas=most),),
    )  # fmt: skip
    model = play.Model("chat", lambda t: loads[int(t // 100) % len(loads)], scale=scale, drain_s=1.0)
    decisions = play.Fleet(model).run(100.0 * len(loads)).decisions("chat")
    for sign, period_s in ((1, 60), (-1, 90)):
        for end, _ in changes(decisions, sign):
            within = [change for at, change in changes(decisions, sign) if end - period_s < at <= end]
            assert sum(within) <= most


@pytest.mark.parametrize(
    ("given_rates", "made", "count"),
    [
        ([{"replicas": 3}], (), 7),
        ([{"replicas": 3}], ((20.0, 2),), 5),
        ([{"replicas": 3}], ((60.0, 2),), 7),
        ([{"replicas": 1}, {"fraction": 0.5}], (), 6),
        # Half of the two that there were a minute ago.
        ([{"fraction": 0.5}], ((20.0, 2),), 4),
        ([{"replicas": 0}], (), 4),
    ],
)
def test_the_rate_that_allows_the_most_applies(
    given_rates: list[dict[str, Any]], made: tuple[tuple[float, int], ...], count: int
) -> None:
    scale = ScaleConfig(rates_up=tuple(ScalingRateLimit(period_s=60, **each) for each in given_rates))
    memory = DecisionMemory(changed=tuple((play.NOON - ago, change) for ago, change in made))
    decision = decide(situation(count=4, scale=scale, memory=memory), 8)[0]
    assert decision.count == count
    assert [each.rule for each in decision.applied_guardrails] == [Guardrail.RATE]


# The scale-up delay.


@pytest.mark.parametrize("hold_up_s", [0.0, 20.0, 60.0])
def test_a_scale_up_is_never_delayed_beyond_its_window(hold_up_s: float) -> None:
    scale = ScaleConfig(hold_up_s=hold_up_s, max_step_up=100)

    def first_rise(lasts_s: float) -> float | None:
        model = play.Model("chat", lambda t: 2.0 if 100 <= t < 100 + lasts_s else 0.5, scale=scale)
        rises = [each for each in play.Fleet(model).run(300).decisions("chat") if each.count > each.was_count]
        return rises[0].at - play.NOON - 100 if rises else None

    # The policy sees a mean over 20 s, which needs more replicas after 10 s.
    seen_s = 5.0
    assert first_rise(150) == pytest.approx(seen_s + hold_up_s, abs=10)
    if hold_up_s == 60:
        assert first_rise(20) is None, "a peak shorter than the window adds nothing"


def test_the_scale_up_delay_leaves_the_floor_and_a_model_at_zero_alone() -> None:
    scale = ScaleConfig(hold_up_s=60.0, min_healthy=3)
    assert decide(situation(count=2, scale=scale), 8)[0].count == 3
    asleep = situation(
        count=0, scale=ScaleConfig(hold_up_s=60.0), mode_options=(mode_option(play.SMALL.mode, least=0),)
    )
    decision, memory = decide(asleep, 5)
    assert decision.count == 1
    assert decision.reason.startswith("wakes from zero; wants 5")
    assert memory.high_since == {5: play.NOON}
    later = msgspec.structs.replace(
        asleep, at=play.NOON + 60, count=1, memory=msgspec.structs.replace(memory, at=play.NOON + 55)
    )
    assert decide(later, 5)[0].count == 2
