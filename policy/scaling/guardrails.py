"""The guardrails that limit the count of a policy.

OVERRIDE, STALENESS, MIN_HEALTHY, then BUDGET over all models, STEP, HOLD. Each rule that changes the count
leaves a :class:`policy.scaling.decision_types.Limit`. A manual override replaces the policy's count and
ignores stale signals, steps and holds, but not bounds, ``min_healthy`` and budgets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from policy.scaling.decision_types import Guardrail, Limit, ModeOption, Override, Situation
from policy.scaling.rollout import MAX_FAILURES

# What ``hold_s: auto`` is at least.
HOLD_S = 60.0
# A product such as 0.1 * 30 may come out a rounding error above 3.
ROUNDING = 1e-9
# A mean level below this counts as zero.
NOBODY = 1e-6


@dataclass(slots=True)
class GuardrailTrace:
    """A count and its changes by the guardrails.

    ``enough`` is the count before budgets, sufficient since ``since``; ``floor`` is guaranteed. ``by_hand``
    marks a manual override, ``asleep`` is the reason for a scale to zero.
    """

    count: int
    enough: int = 0
    since: float = 0.0
    floor: int = 0
    by_hand: bool = False
    asleep: str = ""
    clips: list[Limit] = field(default_factory=list)

    def turn(self, rule: Guardrail, count: int, why: str) -> None:
        """Set ``count``, and record a change."""
        if count != self.count:
            self.clips.append(Limit(rule=rule, was=self.count, now=count, why=why))
            self.count = count


def override_in_force(situation: Situation) -> Override | None:
    """The manual override in force, if its mode exists."""
    hand = situation.override
    if hand is None or (hand.until is not None and situation.at >= hand.until):
        return None
    return hand if any(rung.mode == hand.mode for rung in situation.rungs) else None


def metrics_stale(situation: Situation) -> str:
    """Why signals are too old to scale down on, or an empty string."""
    demand, stale_s = situation.signals.demand, situation.guard.stale_s
    if demand is None:
        return "no gateway has reported"
    if demand.age_s > stale_s:
        return f"demand metrics are {demand.age_s:.1f} s old, guard.stale_s is {stale_s:g} s"
    fresh = sum(figures.age_s <= stale_s for figures in situation.signals.replicas)
    if fresh < situation.supply.serving:
        silent = situation.supply.serving - fresh
        return f"{silent} of {situation.supply.serving} serving replicas have not reported for {stale_s:g} s"
    return ""


def unsettled(situation: Situation) -> str:
    """What has to end before a scale-down, or an empty string.

    A start that fails is not waited for: it may never end.
    """
    if situation.leaving:
        return f"replicas of {', '.join(sorted(situation.leaving))} still drain"
    if situation.supply.failures:
        return ""
    if situation.supply.starting_s:
        return f"{len(situation.supply.starting_s)} starting"
    return "" if situation.settled else "the last decision is not carried out yet"


def asleep(situation: Situation, rung: ModeOption) -> str:
    """Why the model is scaled to zero, or an empty string if it should have replicas."""
    scale, demand = situation.scale, situation.signals.demand
    if scale.zero_after_s is None or rung.least:
        return ""
    if demand is None or metrics_stale(situation):
        # Missing data is no reason to wake a model, a queued request is.
        waits = demand is not None and demand.queued > 0
        return "" if situation.count or waits else f"no replica runs, and {metrics_stale(situation)}"
    busy = sum(figures.running + figures.waiting for figures in situation.signals.replicas)
    if demand.queued or busy or demand.concurrency.last_6_s > NOBODY:
        return ""
    # A restarted gateway, which counts from zero again, does not wake a model.
    asks = demand.arrivals.last_60_s > NOBODY or situation.count > 0
    if asks and demand.idle_s < scale.zero_after_s:
        return ""
    # The rate is at most one request in the time without any.
    rate = min(demand.arrivals.last_600_s, 1 / max(demand.idle_s, 1.0))
    likely = -math.expm1(-rate * rung.lead_s)
    if likely > scale.standby:
        return ""
    return (
        f"no request for {demand.idle_s:.0f} s; the probability of one within the start-up time"
        f" ({rung.lead_s:.0f} s) is {likely:.2f}"
    )


def asked(situation: Situation, rung: ModeOption, proposed: int) -> GuardrailTrace:
    """The count after OVERRIDE, STALENESS and MIN_HEALTHY: what the model asks of the budgets.

    In another mode than there is now, nothing is there yet that could be lost.
    """
    course = GuardrailTrace(proposed, since=situation.at)
    there = situation.count if rung.mode == situation.mode else 0
    hand = override_in_force(situation)
    if hand is not None and hand.count is not None and hand.mode == rung.mode:
        course.by_hand = True
        term = "until cleared" if hand.until is None else f"for {hand.until - situation.at:.0f} s more"
        course.turn(Guardrail.OVERRIDE, hand.count, f"set manually {term}")
    unseen = "" if course.by_hand else metrics_stale(situation)
    if unseen:
        course.turn(Guardrail.STALENESS, max(course.count, there), unseen)
    course.asleep = "" if course.by_hand else asleep(situation, rung)
    if course.asleep:
        course.turn(Guardrail.MIN_HEALTHY, 0, course.asleep)
        if situation.signals.demand is not None and not unseen:
            course.since -= situation.signals.demand.idle_s
    else:
        course.floor, why = _healthy(situation, rung, course)
        course.turn(Guardrail.MIN_HEALTHY, max(course.count, course.floor), why)
    course.enough = course.count
    course.turn(Guardrail.BUDGET, min(course.count, rung.most), f"{rung.mode} has at most {rung.most}")
    if not course.by_hand and (unseen or unsettled(situation)):
        course.floor = max(course.floor, min(there, course.count))
    return course


def allowed(course: GuardrailTrace, situation: Situation, rung: ModeOption, granted: int) -> None:
    """Apply BUDGET with ``granted`` replicas, STEP and HOLD; the last two only within a mode."""
    was = situation.count
    # Replicas whose resources go to others are not held.
    most = granted if granted < course.count else was
    course.turn(Guardrail.BUDGET, min(course.count, granted), f"the budget leaves {granted}")
    if course.by_hand or rung.mode != situation.mode:
        return
    scale, failures = situation.scale, situation.supply.failures
    up = max(1, math.ceil(scale.max_step_up * was - ROUNDING))
    if course.count > was + up:
        course.turn(Guardrail.STEP, was + up, f"at most {up} more per decision")
    if course.count > was > 0 and failures >= MAX_FAILURES:
        course.turn(Guardrail.STEP, was, f"{failures} starts in a row failed")
    down = max(1, math.floor(scale.max_step_down * was + ROUNDING))
    if course.count < was - down:
        course.turn(Guardrail.STEP, was - down, f"at most {down} fewer per decision")
    if course.count < min(was, most):
        kept, why = _held(course, situation, rung)
        course.turn(Guardrail.HOLD, max(course.count, min(kept, most)), why)


def eased(course: GuardrailTrace, situation: Situation) -> dict[int, float]:
    """Since when each count below those of now and next would have been enough, told where that changes.

    An instant holds for its count and all above it, up to the next.
    """
    if course.by_hand:
        return {}
    before, top = situation.memory.low_since, max(situation.count, course.count)
    since = min([course.since, *(at for count, at in before.items() if count <= course.enough)])
    # Fewer than are enough now were not; more than those say something only of a time before.
    kept = {count: at for count, at in before.items() if at < since}
    return {count: at for count, at in sorted({course.enough: since, **kept}.items()) if count < top}


def _healthy(situation: Situation, rung: ModeOption, course: GuardrailTrace) -> tuple[int, str]:
    """The minimum count, and why."""
    if course.by_hand and course.count == 0 == rung.least:
        return 0, ""
    demand, scale = situation.signals.demand, situation.scale
    queued = demand.queued if demand is not None else 0
    return max(
        (int(queued > 0 and situation.count == 0), f"{queued} queued and no replica"),
        (min(max(scale.min_healthy, 1), rung.most), f"scale.min_healthy is {scale.min_healthy}"),
        (rung.least, f"{rung.mode} has at least {rung.least}"),
        key=lambda pair: pair[0],
    )


def _held(course: GuardrailTrace, situation: Situation, rung: ModeOption) -> tuple[int, str]:
    """The count that hold_s keeps, and why."""
    waits = unsettled(situation)
    if waits:
        return situation.count, waits
    chosen = situation.scale.hold_s
    hold_s = max(rung.lead_s, HOLD_S) if chosen == "auto" else chosen
    lows = eased(course, situation)
    long = [count for count, since in lows.items() if situation.at - since >= hold_s]
    shown = situation.at - lows.get(course.enough, situation.at)
    return min(
        long, default=situation.count
    ), f"{course.enough} enough for {shown:.0f} of {hold_s:g} s (scale.hold_s)"
