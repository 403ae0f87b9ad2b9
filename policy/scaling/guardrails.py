"""The guardrails that limit the count of a policy.

OVERRIDE, STALENESS, MIN_HEALTHY, then BUDGET over all models, STEP, HOLD. Each rule that changes the count
leaves a :class:`policy.scaling.decision_types.Limit`. A manual override replaces the policy's count and
ignores stale signals, steps and holds, but not bounds, ``min_healthy`` and budgets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from policy.scaling.decision_types import Guardrail, Limit, ModeOption, Override, Situation
from policy.scaling.transition_steps import MAX_FAILURES

# The minimum of ``hold_s: auto``.
HOLD_S = 60.0
# A product such as 0.1 * 30 may come out a rounding error above 3.
ROUNDING = 1e-9
# A mean level below this counts as zero.
IDLE = 1e-6


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

    def limit(self, rule: Guardrail, count: int, why: str) -> None:
        """Set ``count``, and record a change."""
        if count != self.count:
            self.clips.append(Limit(rule=rule, was=self.count, now=count, why=why))
            self.count = count


def override_in_force(situation: Situation) -> Override | None:
    """The manual override in force, if its mode exists."""
    override = situation.override
    if override is None or (override.until is not None and situation.at >= override.until):
        return None
    return override if any(rung.mode == override.mode for rung in situation.rungs) else None


def metrics_stale(situation: Situation) -> str:
    """Why signals are too old to scale down on, or an empty string."""
    demand, stale_s = situation.signals.demand, situation.guard.stale_s
    if demand is None:
        return "no gateway has reported"
    if demand.age_s > stale_s:
        return f"demand metrics are {demand.age_s:.1f} s old, guard.stale_s is {stale_s:g} s"
    silent = situation.supply.serving - sum(each.age_s <= stale_s for each in situation.signals.replicas)
    if silent > 0:
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


def scale_to_zero(situation: Situation, rung: ModeOption) -> str:
    """Why the model is scaled to zero, or an empty string if it should have replicas."""
    scale, demand = situation.scale, situation.signals.demand
    if scale.zero_after_s is None or rung.least:
        return ""
    if demand is None or metrics_stale(situation):
        # Missing data is no reason to wake a model, a queued request is.
        waits = demand is not None and demand.queued > 0
        return "" if situation.count or waits else f"no replica runs, and {metrics_stale(situation)}"
    busy = sum(replica.running + replica.waiting for replica in situation.signals.replicas)
    if demand.queued or busy or demand.concurrency.last_6_s > IDLE:
        return ""
    # A restarted gateway, which counts from zero again, does not wake a model.
    used = demand.arrivals.last_60_s > IDLE or situation.count > 0
    if used and demand.idle_s < scale.zero_after_s:
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


def requested(situation: Situation, rung: ModeOption, proposed: int) -> GuardrailTrace:
    """The count after OVERRIDE, STALENESS and MIN_HEALTHY: what the model requests of the budgets.

    ``rung`` is the current mode, or that of a switch, which has no replicas yet.
    """
    course = GuardrailTrace(proposed, since=situation.at)
    there = situation.count if rung.mode == situation.mode else 0
    override = override_in_force(situation)
    if override is not None and override.count is not None and override.mode == rung.mode:
        course.by_hand, until = True, override.until
        duration = "until cleared" if until is None else f"for {until - situation.at:.0f} s more"
        course.limit(Guardrail.OVERRIDE, override.count, f"set manually {duration}")
    stale = "" if course.by_hand else metrics_stale(situation)
    if stale:
        course.limit(Guardrail.STALENESS, max(course.count, there), stale)
    course.asleep = "" if course.by_hand else scale_to_zero(situation, rung)
    if course.asleep:
        course.limit(Guardrail.MIN_HEALTHY, 0, course.asleep)
        if situation.signals.demand is not None and not stale:
            course.since -= situation.signals.demand.idle_s
    else:
        course.floor, why = _healthy(situation, rung, course)
        course.limit(Guardrail.MIN_HEALTHY, max(course.count, course.floor), why)
    course.enough = course.count
    course.limit(Guardrail.BUDGET, min(course.count, rung.most), f"{rung.mode} has at most {rung.most}")
    if not course.by_hand and (stale or unsettled(situation)):
        course.floor = max(course.floor, min(there, course.count))
    return course


def limit(course: GuardrailTrace, situation: Situation, rung: ModeOption, granted: int) -> None:
    """Apply BUDGET with ``granted`` replicas, STEP and HOLD; the last two only within a mode."""
    was = situation.count
    # Replicas whose resources other models get are not held.
    most = granted if granted < course.count else was
    course.limit(Guardrail.BUDGET, min(course.count, granted), f"the budget leaves {granted}")
    if course.by_hand or rung.mode != situation.mode:
        return
    scale, failures = situation.scale, situation.supply.failures
    up = max(1, math.ceil(scale.max_step_up * was - ROUNDING))
    if course.count > was + up:
        course.limit(Guardrail.STEP, was + up, f"at most {up} more per decision")
    if course.count > was > 0 and failures >= MAX_FAILURES:
        course.limit(Guardrail.STEP, was, f"{failures} starts in a row failed")
    down = max(1, math.floor(scale.max_step_down * was + ROUNDING))
    if course.count < was - down:
        course.limit(Guardrail.STEP, was - down, f"at most {down} fewer per decision")
    if course.count < min(was, most):
        kept, why = _held(course, situation, rung)
        course.limit(Guardrail.HOLD, max(course.count, min(kept, most)), why)


def low_since(course: GuardrailTrace, situation: Situation) -> dict[int, float]:
    """Since when each count below the current and the next one would have been enough.

    An instant holds for its count and all above it, up to the next count in the result.
    """
    if course.by_hand:
        return {}
    before, top = situation.memory.low_since, max(situation.count, course.count)
    since = min([course.since, *(at for count, at in before.items() if count <= course.enough)])
    # Fewer replicas than are enough now were not; larger counts only matter if they were enough for longer.
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
    lows = low_since(course, situation)
    long = [count for count, since in lows.items() if situation.at - since >= hold_s]
    shown = situation.at - lows.get(course.enough, situation.at)
    why = f"{course.enough} enough for {shown:.0f} of {hold_s:g} s (scale.hold_s)"
    return min(long, default=situation.count), why
