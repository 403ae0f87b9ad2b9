"""The effect, order and reason of each guardrail."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.config.control import ScaleConfig
from policy.config.deployment import ResourceBudget
from policy.scaling.decide import ModelPolicies, decide_all
from policy.scaling.decision_types import Decision, DecisionMemory, Guardrail, ModeOverride, Situation
from policy.scaling.view import Supply
from policy.signals.types import Signals
from tests.policy import control_play as play
from tests.policy.control_play import SMALL, Fixed, decide, demand, figures, mode_option, rates, situation

ZERO = mode_option("multi-replica", least=0)
SLEEPY = ScaleConfig(zero_after_s=300.0)


def applied(decision: Decision) -> list[tuple[str, int, int]]:
    return [(each.rule.value, each.was, each.now) for each in decision.applied_guardrails]


def enough_for(seconds: float, count: int, given: Situation) -> Situation:
    """``count`` has been enough for ``seconds``."""
    return msgspec.structs.replace(given, memory=DecisionMemory(low_since={count: given.at - seconds}))


# Override.


def by_hand(count: int | None, until: float | None = None, mode: str = SMALL.mode) -> ModeOverride:
    return ModeOverride(mode=mode, count=count, until=until)


def test_an_override_ignores_policies_steps_holds_and_stale_metrics() -> None:
    given = situation(count=6, signals=Signals(), override=by_hand(1))
    decision, memory = decide(given, 6)
    assert (decision.count, applied(decision)) == (1, [("override", 6, 1)])
    assert decision.applied_guardrails[0].why == "set manually until cleared"
    # The scale-down delay begins again at its end.
    assert memory.low_since == {}


def test_bounds_min_healthy_and_budgets_limit_an_override() -> None:
    healthy = ScaleConfig(min_healthy=2)
    over = decide(situation(count=2, override=by_hand(20)), 2)[0]
    assert (over.count, applied(over)) == (8, [("override", 2, 20), ("budget", 20, 8)])
    poor = decide(situation(count=2, override=by_hand(7)), 2, ResourceBudget(gpus=5))[0]
    assert (poor.count, applied(poor)) == (5, [("override", 2, 7), ("budget", 7, 5)])
    low = decide(situation(count=2, override=by_hand(1), scale=healthy), 2)[0]
    assert (low.count, applied(low)) == (2, [("override", 2, 1), ("min_healthy", 1, 2)])


def test_an_override_can_scale_to_zero() -> None:
    given = situation(count=2, mode_options=(ZERO,), override=by_hand(0))
    assert decide(given, 2)[0].count == 0
    waits = Signals(demand=demand(1.0, queued=3))
    asleep = situation(count=0, mode_options=(ZERO,), signals=waits, override=by_hand(0))
    assert decide(asleep, 1)[0].count == 0
    assert decide(situation(count=2, override=by_hand(0)), 2)[0].count == 1


@pytest.mark.parametrize(("override", "asked"), [(by_hand(7, mode="huge"), 2), (by_hand(None), 3)])
def test_an_override_of_a_removed_mode_or_without_a_count_leaves_the_count(
    override: ModeOverride, asked: int
) -> None:
    decision = decide(situation(count=2, mode_options=(SMALL, play.LARGE), override=override), asked)[0]
    assert (decision.mode, decision.count, decision.applied_guardrails) == (SMALL.mode, asked, ())


# Staleness.


@pytest.mark.parametrize(
    ("signals", "why"),
    [
        (Signals(), "no gateway has reported"),
        (Signals(demand=demand(1.0, age_s=15.1), replicas=figures(4)), "demand metrics are 15.1 s old"),
        (Signals(demand=demand(1.0), replicas=figures(3)), "1 of 4 serving replicas have not reported"),
        (Signals(demand=demand(1.0), replicas=figures(4, age_s=16.0)), "4 of 4 serving replicas"),
    ],
)
def test_stale_metrics_never_scale_down(signals: Signals, why: str) -> None:
    given = enough_for(3600, 1, situation(count=4, signals=signals))
    decision, memory = decide(given, 1)
    assert (decision.count, applied(decision)) == (4, [("staleness", 1, 4)])
    assert decision.applied_guardrails[0].why.startswith(why)
    assert memory.low_since == {}, "the scale-down delay begins again"
    assert decide(given, 6)[0].count == 6


def test_metrics_as_old_as_allowed_are_not_stale() -> None:
    signals = Signals(demand=demand(1.0, age_s=15.0), replicas=figures(4, age_s=15.0))
    assert decide(enough_for(60, 2, situation(count=4, signals=signals)), 2)[0].count == 2


# Minimum, and scale to zero.


def idle(seconds: float, count: int = 1, **changes: Any) -> Situation:
    """No request for ``seconds``, and none runs."""
    changes = {"idle_s": seconds, "arrivals": rates(0.0), "concurrency": rates(0.0)} | changes
    signals = Signals(demand=demand(0.0, **changes), replicas=figures(count, running=0))
    return situation(count=count, mode_options=(ZERO,), scale=SLEEPY, signals=signals)


def test_an_idle_model_is_scaled_to_zero() -> None:
    decision = decide(idle(300.0), 1)[0]
    assert (decision.count, applied(decision)) == (0, [("min_healthy", 1, 0)])
    assert "no request for 300 s" in decision.applied_guardrails[0].why


@pytest.mark.parametrize(
    "given",
    [
        idle(299.0),
        idle(600.0, queued=1),
        idle(600.0, concurrency=rates(0.1)),
        # The probability of a request within the start-up time is 0.63.
        msgspec.structs.replace(
            idle(300.0, arrivals=msgspec.structs.replace(rates(0.0), last_600_s=0.05)),
            mode_options=(mode_option("multi-replica", least=0, lead_s=300.0),),
        ),
        msgspec.structs.replace(idle(600.0), scale=ScaleConfig()),
        msgspec.structs.replace(idle(600.0), mode_options=(SMALL,)),
        msgspec.structs.replace(idle(600.0), signals=Signals(demand=idle(600.0).signals.demand)),
        msgspec.structs.replace(
            idle(600.0), signals=Signals(demand=idle(600.0).signals.demand, replicas=figures(1, running=1))
        ),
    ],
    ids=["soon", "queued", "running", "likely", "unset", "not in this mode", "stale", "in an engine"],
)
def test_one_replica_stays_unless_the_model_is_idle(given: Situation) -> None:
    assert decide(given, 0)[0].count == 1


def test_a_queued_request_wakes_a_model_at_once() -> None:
    given = idle(0.0, count=0, queued=2, arrivals=rates(0.1))
    decision = decide(given, 0)[0]
    assert (decision.count, applied(decision)) == (1, [("min_healthy", 0, 1)])
    assert decision.applied_guardrails[0].why == "2 queued and no replica"


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (idle(900.0, count=0), 0),
        (msgspec.structs.replace(idle(900.0, count=0), signals=Signals()), 0),
        # A restarted gateway counts from zero.
        (idle(3.0, count=0), 0),
        (idle(3.0, count=0, arrivals=rates(0.2)), 1),
        (idle(900.0, count=0, age_s=60.0, queued=1), 1),
    ],
    ids=["idle", "no data", "new gateway", "requests", "queued, stale"],
)
def test_only_requests_wake_a_model(given: Situation, count: int) -> None:
    # The policy would wake it: its forecast includes earlier load.
    assert decide(given, 2)[0].count == count


# Budget.


def test_a_budget_limits_and_reports_the_shortage() -> None:
    given = situation(rate=6.0, count=2, spillover=True)
    decision, memory = decide(given, 4, ResourceBudget(gpus=3))
    assert (decision.count, applied(decision)) == (3, [("budget", 4, 3)])
    assert decision.short == pytest.approx(6.0 - 3 * decision.capability.mu)
    assert "3.12 req/s over capacity, may spill over to upstreams" in decision.reason
    assert memory.starved_since == play.NOON
    later = msgspec.structs.replace(given, at=play.NOON + 5, memory=memory)
    assert decide(later, 4, ResourceBudget(gpus=3))[1].starved_since == play.NOON
    assert decide(later, 4)[1].starved_since is None


def test_the_bounds_of_a_mode_leave_a_shortage_too() -> None:
    given = situation(rate=3.0, mode_options=(mode_option("multi-replica", most=1),))
    decision = decide(given, 1)[0]
    assert decision.short == pytest.approx(3.0 - decision.capability.mu)
    # Below the bounds the policy needs no more.
    assert decide(situation(rate=3.0), 1)[0].short == 0.0


def test_a_smaller_budget_applies_in_steps_without_delay() -> None:
    decision = decide(situation(count=8), 8, ResourceBudget(gpus=2))[0]
    assert applied(decision) == [("budget", 8, 2), ("step", 2, 4)]


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, 3),
        ({"signals": Signals()}, 6),
        ({"supply": Supply(wanted=6, serving=5, starting_s=(9.0,))}, 6),
        ({"leaving": {"single-large": 1}}, 6),
    ],
    ids=["fresh", "stale", "starting", "switching"],
)
def test_replicas_of_a_stale_or_changing_model_are_not_taken(changes: dict[str, Any], left: int) -> None:
    """``low`` has six of eight GPUs, of which a higher priority needs five and has two."""
    low = situation(**({"model": "low", "count": 6, "priority": -1} | changes))
    high = situation(model="high", count=2, memory=DecisionMemory(starved_since=play.NOON - 10))
    policies = {"low": ModelPolicies(Fixed(6)), "high": ModelPolicies(Fixed(5))}
    made = decide_all({"low": low, "high": high}, ResourceBudget(gpus=8), policies)
    assert {name: decision.count for name, (decision, _) in made.items()} == {"low": left, "high": 2}


# Step.


@pytest.mark.parametrize(
    ("count", "asked", "part", "now"),
    [
        *((1, 9, 1.0, 2), (3, 9, 1.0, 6), (3, 9, 0.5, 5), (4, 9, 0.1, 5), (0, 5, 1.0, 1), (2, 4, 1.0, 4)),
        *((8, 1, 0.5, 4), (3, 1, 0.5, 2), (2, 1, 0.1, 1), (8, 1, 1.0, 1)),
    ],
)
def test_a_step_is_a_fraction_of_the_count_or_one(count: int, asked: int, part: float, now: int) -> None:
    wide, scale = mode_option("multi-replica", most=20), ScaleConfig(max_step_up=part, max_step_down=part)
    given = enough_for(60, 1, situation(count=count, scale=scale, mode_options=(wide,)))
    assert decide(given, asked)[0].count == now


def test_failing_starts_stop_a_scale_up() -> None:
    failing = Supply(wanted=3, serving=2, failures=3)
    decision = decide(situation(count=3, supply=failing), 5)[0]
    assert (decision.count, applied(decision)) == (3, [("step", 5, 3)])
    assert decision.applied_guardrails[0].why == "3 starts in a row failed"
    twice = msgspec.structs.replace(failing, failures=2)
    assert decide(situation(count=3, supply=twice), 5)[0].count == 5
    # A model at zero is woken all the same.
    given = msgspec.structs.replace(idle(0.0, count=0, queued=1), supply=Supply(failures=9))
    assert decide(given, 0)[0].count == 1


# Hold.


def test_a_scale_down_is_to_the_count_that_was_enough_for_the_whole_delay() -> None:
    lows = {1: play.NOON - 20, 3: play.NOON - 60, 5: play.NOON - 300}
    given = situation(count=6, scale=ScaleConfig(max_step_down=1.0), memory=DecisionMemory(low_since=lows))
    decision, memory = decide(given, 1)
    assert (decision.count, applied(decision)) == (3, [("hold", 1, 3)])
    assert decision.applied_guardrails[0].why == "1 enough for 20 of 60 s (scale.hold_s)"
    assert memory.low_since == lows


def test_a_higher_need_restarts_the_delay_of_lower_counts() -> None:
    lows = {1: play.NOON - 20, 3: play.NOON - 60}
    given = situation(count=6, memory=DecisionMemory(low_since=lows))
    memory = decide(given, 4)[1]
    # Four have been enough since three were.
    assert memory.low_since == {4: play.NOON - 60}


@pytest.mark.parametrize(
    ("hold_s", "lead_s", "held_s"), [("auto", 30.0, 60.0), ("auto", 200.0, 200.0), (15.0, 200.0, 15.0)]
)
def test_the_auto_delay_is_a_minute_or_the_start_up_time(hold_s: Any, lead_s: float, held_s: float) -> None:
    given = situation(
        count=2, mode_options=(mode_option("multi-replica", lead_s=lead_s),), scale=ScaleConfig(hold_s=hold_s)
    )
    assert decide(enough_for(held_s - 0.1, 1, given), 1)[0].count == 2
    assert decide(enough_for(held_s, 1, given), 1)[0].count == 1


@pytest.mark.parametrize(
    ("changes", "count", "why"),
    [
        ({"supply": Supply(wanted=4, serving=3, starting_s=(9.0,))}, 4, "1 starting"),
        ({"settled": False}, 4, "the last decision is not carried out yet"),
        ({"leaving": {"single-large": 1}, "settled": False}, 4, "replicas of single-large still drain"),
        ({"supply": Supply(wanted=4, serving=3, starting_s=(9.0,), failures=1), "settled": False}, 2, ""),
        ({"supply": Supply(wanted=4, serving=3, failures=5), "leaving": {"single-large": 1}}, 4, "replicas"),
    ],
    ids=["starting", "unsettled", "switching", "failing", "failing switch"],
)
def test_no_scale_down_while_a_change_is_under_way(changes: dict[str, Any], count: int, why: str) -> None:
    decision = decide(enough_for(3600, 2, situation(count=4, **changes)), 2)[0]
    assert decision.count == count
    assert why in "".join(each.why for each in decision.applied_guardrails if each.rule is Guardrail.HOLD)


def test_a_scale_up_is_allowed_during_a_switch() -> None:
    given = situation(count=2, settled=False, leaving={"single-large": 1})
    assert decide(given, 4)[0].count == 4


def test_the_order_of_the_guardrails() -> None:
    given = situation(
        count=1,
        signals=Signals(),
        scale=ScaleConfig(min_healthy=4, max_step_up=1.0),
        mode_options=(mode_option("multi-replica", most=6),),
    )
    decision = decide(given, 0, ResourceBudget(gpus=3))[0]
    steps = [("staleness", 0, 1), ("min_healthy", 1, 4), ("budget", 4, 3), ("step", 3, 2)]
    assert applied(decision) == steps
