"""What each safety rule does to a count, in which order, and what it says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.config.control import ScaleConfig
from policy.config.deployment import Budget
from policy.scaling.decide import ModelPolicies, decide_all
from policy.scaling.decision_types import Decision, Guardrail, Memory, Override, Situation
from policy.scaling.view import Supply
from policy.signals.types import Signals
from tests.policy.control_play import (
    LARGE,
    NOON,
    SMALL,
    Wants,
    decide,
    demand,
    figures,
    rates,
    rung,
    situation,
)

ZERO = rung("multi-replica", least=0)
SLEEPY = ScaleConfig(zero_after_s=300.0)


def clips(decision: Decision) -> list[tuple[str, int, int]]:
    return [(clip.rule.value, clip.was, clip.now) for clip in decision.clips]


def enough_for(seconds: float, count: int, given: Situation) -> Situation:
    """With ``count`` having been enough for so long."""
    return msgspec.structs.replace(given, memory=Memory(low_since={count: given.at - seconds}))


# Override.


def by_hand(count: int | None, until: float | None = None, mode: str = SMALL.mode) -> Override:
    return Override(mode=mode, count=count, until=until)


def test_what_is_set_by_hand_goes_before_policies_steps_holds_and_signals() -> None:
    given = situation(count=6, signals=Signals(), override=by_hand(1))
    decision, memory = decide(given, 6)
    assert (decision.count, clips(decision)) == (1, [("override", 6, 1)])
    assert decision.clips[0].why == "set manually until cleared"
    # The end of a term is no reason to fall: holding begins anew.
    assert memory.low_since == {}


def test_bounds_min_healthy_and_budgets_bind_what_is_set_by_hand() -> None:
    healthy = ScaleConfig(min_healthy=2)
    over = decide(situation(count=2, override=by_hand(20)), 2)[0]
    assert (over.count, clips(over)) == (8, [("override", 2, 20), ("budget", 20, 8)])
    poor = decide(situation(count=2, override=by_hand(7)), 2, Budget(gpus=5))[0]
    assert (poor.count, clips(poor)) == (5, [("override", 2, 7), ("budget", 7, 5)])
    low = decide(situation(count=2, override=by_hand(1), scale=healthy), 2)[0]
    assert (low.count, clips(low)) == (2, [("override", 2, 1), ("min_healthy", 1, 2)])


def test_a_mode_that_may_have_none_can_be_put_to_sleep_by_hand_and_stays_so() -> None:
    given = situation(count=2, rungs=(ZERO,), override=by_hand(0))
    assert decide(given, 2)[0].count == 0
    waits = Signals(demand=demand(1.0, queued=3))
    asleep = situation(count=0, rungs=(ZERO,), signals=waits, override=by_hand(0))
    assert decide(asleep, 1)[0].count == 0
    assert decide(situation(count=2, override=by_hand(0)), 2)[0].count == 1


def test_an_override_of_a_mode_that_is_gone_is_none() -> None:
    assert decide(situation(count=2, override=by_hand(7, mode="huge")), 2)[0].count == 2


def test_a_mode_set_by_hand_leaves_the_count_to_the_policy() -> None:
    given = situation(count=2, rungs=(SMALL, LARGE), override=by_hand(None))
    decision = decide(given, 3)[0]
    assert (decision.mode, decision.count, decision.clips) == (SMALL.mode, 3, ())


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
def test_what_is_not_seen_takes_nothing_away_however_long(signals: Signals, why: str) -> None:
    given = enough_for(3600, 1, situation(count=4, signals=signals))
    decision = decide(given, 1)[0]
    assert (decision.count, clips(decision)) == (4, [("staleness", 1, 4)])
    assert decision.clips[0].why.startswith(why)


def test_what_is_not_seen_may_still_add() -> None:
    assert decide(situation(count=2, signals=Signals()), 4)[0].count == 4


def test_figures_as_old_as_allowed_are_seen() -> None:
    signals = Signals(demand=demand(1.0, age_s=15.0), replicas=figures(4, age_s=15.0))
    assert decide(enough_for(60, 2, situation(count=4, signals=signals)), 2)[0].count == 2


def test_a_gap_in_the_signals_begins_the_hold_anew() -> None:
    memory = decide(enough_for(3600, 1, situation(count=4, signals=Signals())), 1)[1]
    assert memory.low_since == {}


# Min healthy, and none at all.


def idle(seconds: float, count: int = 1, **changes: Any) -> Situation:
    """Nobody has asked for so long, and nothing runs."""
    changes = {"idle_s": seconds, "arrivals": rates(0.0), "concurrency": rates(0.0)} | changes
    signals = Signals(demand=demand(0.0, **changes), replicas=figures(count, running=0))
    return situation(count=count, rungs=(ZERO,), scale=SLEEPY, signals=signals)


def test_after_so_long_without_a_request_there_is_none() -> None:
    decision = decide(idle(300.0), 1)[0]
    assert (decision.count, clips(decision)) == (0, [("min_healthy", 1, 0)])
    assert "no request for 300 s" in decision.clips[0].why


@pytest.mark.parametrize(
    "given",
    [
        idle(299.0),
        idle(600.0, queued=1),
        idle(600.0, concurrency=rates(0.1)),
        # Nobody for 300 s, and a start takes as long: somebody comes meanwhile with a probability of 0.63.
        msgspec.structs.replace(
            idle(300.0, arrivals=msgspec.structs.replace(rates(0.0), last_600_s=0.05)),
            rungs=(rung("multi-replica", least=0, lead_s=300.0),),
        ),
        msgspec.structs.replace(idle(600.0), scale=ScaleConfig()),
        msgspec.structs.replace(idle(600.0), rungs=(SMALL,)),
        msgspec.structs.replace(idle(600.0), signals=Signals(demand=idle(600.0).signals.demand)),
        msgspec.structs.replace(
            idle(600.0),
            signals=Signals(demand=idle(600.0).signals.demand, replicas=figures(1, running=1)),
        ),
    ],
    ids=["soon", "queued", "running", "likely", "unset", "not the mode", "unseen", "in an engine"],
)
def test_otherwise_one_stays(given: Situation) -> None:
    assert decide(given, 0)[0].count == 1


def test_who_waits_wakes_a_model_at_once_whatever_the_policy_says() -> None:
    given = idle(0.0, count=0, queued=2, arrivals=rates(0.1))
    decision = decide(given, 0)[0]
    assert (decision.count, clips(decision)) == (1, [("min_healthy", 0, 1)])
    assert decision.clips[0].why == "2 queued and no replica"


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (idle(900.0, count=0), 0),
        (msgspec.structs.replace(idle(900.0, count=0), signals=Signals()), 0),
        # A gateway that began to count anew heard of nobody either.
        (idle(3.0, count=0), 0),
        (idle(3.0, count=0, arrivals=rates(0.2)), 1),
        (idle(900.0, count=0, age_s=60.0, queued=1), 1),
    ],
    ids=["nobody", "no data", "new gateway", "somebody asked", "waits, told long ago"],
)
def test_a_sleeper_wakes_for_somebody_only(given: Situation, count: int) -> None:
    # The policy would wake it: its forecast remembers that there was load.
    assert decide(given, 2)[0].count == count


# Budget.


def test_a_budget_bounds_and_says_what_is_short() -> None:
    given = situation(rate=6.0, count=2, overflow=True)
    decision, memory = decide(given, 4, Budget(gpus=3))
    assert (decision.count, clips(decision)) == (3, [("budget", 4, 3)])
    assert decision.short == pytest.approx(6.0 - 3 * decision.capability.mu)
    assert "3.12 req/s over capacity, may spill over to upstreams" in decision.reason
    assert memory.starved_since == NOON
    later = msgspec.structs.replace(given, at=NOON + 5, memory=memory)
    assert decide(later, 4, Budget(gpus=3))[1].starved_since == NOON
    assert decide(later, 4)[1].starved_since is None


def test_what_the_bounds_of_a_mode_leave_unserved_is_short_as_well() -> None:
    given = situation(rate=3.0, rungs=(rung("multi-replica", most=1),))
    decision = decide(given, 1)[0]
    assert decision.short == pytest.approx(3.0 - decision.capability.mu)
    # Where more may be had it is the policy that asks for no more.
    assert decide(situation(rate=3.0), 1)[0].short == 0.0


def test_a_budget_that_shrinks_is_not_held_but_goes_by_steps() -> None:
    decision = decide(situation(count=8), 8, Budget(gpus=2))[0]
    assert clips(decision) == [("budget", 8, 2), ("step", 2, 4)]


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, 3),
        ({"signals": Signals()}, 6),
        ({"supply": Supply(wanted=6, serving=5, starting_s=(9.0,))}, 6),
        ({"leaving": {"single-large": 1}}, 6),
    ],
    ids=["seen", "unseen", "starting", "switching"],
)
def test_nobody_takes_from_who_is_not_seen_or_under_way(changes: dict[str, Any], left: int) -> None:
    """Six of eight cards, of which a model of a higher priority wants five and has two."""
    low = situation(**({"model": "low", "count": 6, "priority": -1} | changes))
    high = situation(model="high", count=2, memory=Memory(starved_since=NOON - 10))
    made = decide_all(
        {"low": low, "high": high},
        Budget(gpus=8),
        {"low": ModelPolicies(Wants(6)), "high": ModelPolicies(Wants(5))},
    )
    assert {name: decision.count for name, (decision, _) in made.items()} == {"low": left, "high": 2}


# Step.


@pytest.mark.parametrize(
    ("count", "asked", "part", "now"),
    [
        *((1, 9, 1.0, 2), (3, 9, 1.0, 6), (3, 9, 0.5, 5), (4, 9, 0.1, 5), (0, 5, 1.0, 1), (2, 4, 1.0, 4)),
        *((8, 1, 0.5, 4), (3, 1, 0.5, 2), (2, 1, 0.1, 1), (8, 1, 1.0, 1)),
    ],
)
def test_a_step_is_a_part_of_what_there_is_and_one_at_least(
    count: int, asked: int, part: float, now: int
) -> None:
    wide, scale = rung("multi-replica", most=20), ScaleConfig(max_step_up=part, max_step_down=part)
    given = enough_for(60, 1, situation(count=count, scale=scale, rungs=(wide,)))
    assert decide(given, asked)[0].count == now


def test_what_fails_to_start_gets_no_more_of_it() -> None:
    failing = Supply(wanted=3, serving=2, failures=3)
    decision = decide(situation(count=3, supply=failing), 5)[0]
    assert (decision.count, clips(decision)) == (3, [("step", 5, 3)])
    assert decision.clips[0].why == "3 starts in a row failed"
    twice = msgspec.structs.replace(failing, failures=2)
    assert decide(situation(count=3, supply=twice), 5)[0].count == 5
    # But who sleeps is woken, for nobody else is there.
    given = msgspec.structs.replace(idle(0.0, count=0, queued=1), supply=Supply(failures=9))
    assert decide(given, 0)[0].count == 1


# Hold.


def test_a_count_falls_to_what_was_enough_for_the_whole_hold() -> None:
    lows = {1: NOON - 20, 3: NOON - 60, 5: NOON - 300}
    given = situation(count=6, scale=ScaleConfig(max_step_down=1.0), memory=Memory(low_since=lows))
    decision, memory = decide(given, 1)
    assert (decision.count, clips(decision)) == (3, [("hold", 1, 3)])
    assert decision.clips[0].why == "1 enough for 20 of 60 s (scale.hold_s)"
    assert memory.low_since == lows


def test_more_is_wanted_so_fewer_were_never_enough() -> None:
    lows = {1: NOON - 20, 3: NOON - 60}
    given = situation(count=6, memory=Memory(low_since=lows))
    memory = decide(given, 4)[1]
    # Four have been enough since three were; three are no more.
    assert memory.low_since == {4: NOON - 60}


@pytest.mark.parametrize(
    ("hold_s", "lead_s", "held_s"), [("auto", 30.0, 60.0), ("auto", 200.0, 200.0), (15.0, 200.0, 15.0)]
)
def test_auto_is_a_minute_or_the_time_of_a_start(hold_s: Any, lead_s: float, held_s: float) -> None:
    given = situation(
        count=2, rungs=(rung("multi-replica", lead_s=lead_s),), scale=ScaleConfig(hold_s=hold_s)
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
def test_nothing_falls_while_something_is_under_way(changes: dict[str, Any], count: int, why: str) -> None:
    decision = decide(enough_for(3600, 2, situation(count=4, **changes)), 2)[0]
    assert decision.count == count
    assert why in "".join(clip.why for clip in decision.clips if clip.rule is Guardrail.HOLD)


def test_a_switch_under_way_may_grow() -> None:
    given = situation(count=2, settled=False, leaving={"single-large": 1})
    assert decide(given, 4)[0].count == 4


def test_the_rules_are_applied_in_their_order() -> None:
    given = situation(
        count=1,
        signals=Signals(),
        scale=ScaleConfig(min_healthy=4, max_step_up=1.0),
        rungs=(rung("multi-replica", most=6),),
    )
    decision = decide(given, 0, Budget(gpus=3))[0]
    assert [clip.rule for clip in decision.clips] == [
        Guardrail.STALENESS,
        Guardrail.MIN_HEALTHY,
        Guardrail.BUDGET,
        Guardrail.STEP,
    ]
    assert [(clip.was, clip.now) for clip in decision.clips] == [(0, 1), (1, 4), (4, 3), (3, 2)]
