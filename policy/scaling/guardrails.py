"""The guardrails that limit the count of a policy.

SPARE, OVERRIDE, STALENESS, MIN_HEALTHY, SCHEDULE, then BUDGET over all models, STEP, RATE, HOLD. Each rule
that changes the count leaves a :class:`policy.scaling.decision_types.AppliedGuardrail`. A manual override
replaces the policy's count and ignores stale signals, steps, rates and holds, but not bounds, ``min_healthy``
and budgets. Schedules change the bounds of the modes: no step, rate or hold delays them, as with the bounds
of Kubernetes' Horizontal Pod Autoscaler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from policy.config.control import ScalingRateLimit, ScalingSchedule
from policy.scaling.decision_types import AppliedGuardrail, Guardrail, ModeOption, ModeOverride, Situation
from policy.scaling.reconcile_steps import MAX_FAILURES
from policy.scaling.view import Proposal

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
    applied_guardrails: list[AppliedGuardrail] = field(default_factory=list)

    def limit(self, rule: Guardrail, count: int, why: str) -> None:
        """Set ``count``, and record a change."""
        if count != self.count:
            self.applied_guardrails.append(AppliedGuardrail(rule=rule, was=self.count, now=count, why=why))
            self.count = count


def schedules_in_force(situation: Situation) -> list[tuple[str, ScalingSchedule]]:
    """The schedules that apply now, with their keys in the deployment file."""
    schedules = enumerate(situation.scale.schedules)
    return [
        (f"scale.schedules[{i}]", each)
        for i, each in schedules
        if each.in_force(situation.wall_clocks.get(each.timezone, situation.at))
    ]


def scheduled(situation: Situation) -> Situation:
    """The situation with modes whose bounds are those of the schedules in force, within their own."""
    now = [schedule for _, schedule in schedules_in_force(situation)]
    floor = max((each.min for each in now if each.min is not None), default=0)
    ceiling = min((each.max for each in now if each.max is not None), default=math.inf)
    mode_options = []
    for option in situation.mode_options if now else ():
        least = max(option.least, min(floor, option.most))
        most = max(least, int(min(ceiling, option.most)))
        mode_options.append(msgspec.structs.replace(option, least=least, most=most))
    return msgspec.structs.replace(situation, mode_options=tuple(mode_options)) if mode_options else situation


def bound_of_policy(situation: Situation, option: ModeOption, proposal: Proposal) -> AppliedGuardrail | None:
    """The bound of ``option`` that the policy applied to its count itself; ``None`` if it applied none."""
    if proposal.unbounded is None:
        return None
    rule, why = _most(situation, option) if proposal.count < proposal.unbounded else _least(situation, option)
    if proposal.count > max(option.least, proposal.unbounded):
        why = "requests wait or run"
    return AppliedGuardrail(rule=rule, was=proposal.unbounded, now=proposal.count, why=why)


def describe(applied: AppliedGuardrail, count: int) -> str:
    """What a rule did to a proposal, where ``count`` replicas are desired now."""
    more = "kept at" if applied.now == count else "raised to"
    effect = "capped at" if applied.now < applied.was else more
    return f"{effect} {applied.now} by {applied.rule}: {applied.why}"


def override_in_force(situation: Situation) -> ModeOverride | None:
    """The manual override in force, if its mode exists."""
    override = situation.override
    if override is None or (override.until is not None and situation.at >= override.until):
        return None
    return override if any(option.mode == override.mode for option in situation.mode_options) else None


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


def scale_to_zero(situation: Situation, option: ModeOption) -> str:
    """Why the model is scaled to zero, or an empty string if it should have replicas."""
    scale, demand = situation.scale, situation.signals.demand
    if scale.zero_after_s is None or option.least:
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
    likely = -math.expm1(-rate * option.lead_s)
    if likely > scale.standby:
        return ""
    return (
        f"no request for {demand.idle_s:.0f} s; the probability of one within the start-up time"
        f" ({option.lead_s:.0f} s) is {likely:.2f}"
    )


def proposed(situation: Situation, option: ModeOption, proposal: Proposal) -> GuardrailTrace:
    """As :func:`requested`, for the ``proposal`` of a policy in the current mode, with the spare replicas."""
    spare = situation.scale.spare
    most = min(proposal.count + spare, option.most)
    why = f"scale.spare keeps {spare} ready beyond the need"
    more = AppliedGuardrail(rule=Guardrail.SPARE, was=proposal.count, now=most, why=why)
    if more.now <= more.was:
        return requested(situation, option, proposal.count)
    return requested(situation, option, more.now, (more,))


def requested(
    situation: Situation, option: ModeOption, count: int, applied: Sequence[AppliedGuardrail] = ()
) -> GuardrailTrace:
    """The count after OVERRIDE, STALENESS, MIN_HEALTHY and SCHEDULE: what the model requests of the budgets.

    ``option`` is the current mode, or that of a switch, which has no replicas yet. ``applied`` are
    the changes so far.
    """
    course = GuardrailTrace(count, since=situation.at, applied_guardrails=[*applied])
    there = situation.count if option.mode == situation.mode else 0
    override = override_in_force(situation)
    if override is not None and override.count is not None and override.mode == option.mode:
        course.by_hand, until = True, override.until
        duration = "until cleared" if until is None else f"for {until - situation.at:.0f} s more"
        course.limit(Guardrail.OVERRIDE, override.count, f"set manually {duration}")
    stale = "" if course.by_hand else metrics_stale(situation)
    if stale:
        course.limit(Guardrail.STALENESS, max(course.count, there), stale)
    course.asleep = "" if course.by_hand else scale_to_zero(situation, option)
    if course.asleep:
        course.limit(Guardrail.MIN_HEALTHY, 0, course.asleep)
        if situation.signals.demand is not None and not stale:
            course.since -= situation.signals.demand.idle_s
    else:
        course.floor, rule, why = _healthy(situation, option, course)
        course.limit(rule, max(course.count, course.floor), why)
    course.enough = course.count
    rule, why = _most(situation, option)
    course.limit(rule, min(course.count, option.most), why)
    if not course.by_hand and (stale or unsettled(situation)):
        course.floor = max(course.floor, min(there, course.count))
    return course


def limit(course: GuardrailTrace, situation: Situation, option: ModeOption, granted: int) -> None:
    """Apply BUDGET with ``granted`` replicas, STEP, RATE and HOLD; the last three only within a mode."""
    was = situation.count
    # Replicas whose resources other models get, and those above the bounds of a schedule, are not held.
    ceiling = option.most if _most(situation, option)[0] is Guardrail.SCHEDULE else max(was, option.most)
    most = min(granted if granted < course.count else was, ceiling)
    course.limit(Guardrail.BUDGET, min(course.count, granted), f"the budget leaves {granted}")
    if course.by_hand or option.mode != situation.mode:
        return
    scale, failures = situation.scale, situation.supply.failures
    # A schedule's least count is reached at once, as the most is.
    at_once = _least(situation, option)[0] is Guardrail.SCHEDULE
    least, floor = min(course.count, option.least * at_once), min(course.count, max(course.floor, was))
    up = max(1, math.ceil(scale.max_step_up * was - ROUNDING))
    if course.count > max(was + up, least):
        course.limit(Guardrail.STEP, max(was + up, least), f"at most {up} more per decision")
    if course.count > was > 0 and failures >= MAX_FAILURES:
        course.limit(Guardrail.STEP, was, f"{failures} starts in a row failed")
    down = max(1, math.floor(scale.max_step_down * was + ROUNDING))
    if course.count < min(was - down, ceiling):
        course.limit(Guardrail.STEP, min(was - down, ceiling), f"at most {down} fewer per decision")
    if course.count > was and scale.rates_up:
        allowed, why = _allowed(situation, scale.rates_up, 1)
        course.limit(Guardrail.RATE, min(course.count, max(was + allowed, floor)), why)
    if course.count > was and scale.hold_up_s:
        needed, why = _needed(course, situation)
        course.limit(Guardrail.HOLD, min(course.count, max(needed, floor)), why)
    if course.count < min(was, most) and scale.rates_down:
        allowed, why = _allowed(situation, scale.rates_down, -1)
        course.limit(Guardrail.RATE, max(course.count, min(was - allowed, most)), why)
    if course.count < min(was, most):
        kept, why = _held(course, situation, option)
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


def high_since(course: GuardrailTrace, situation: Situation) -> dict[int, float]:
    """Since when each count above the next one is needed, where ``hold_up_s`` asks; as :func:`low_since`."""
    if course.by_hand or not situation.scale.hold_up_s:
        return {}
    since = _since_needed(course, situation)
    kept = {count: at for count, at in situation.memory.high_since.items() if at < since}
    return {count: at for count, at in sorted({**kept, course.enough: since}.items()) if count > course.count}


def changed(course: GuardrailTrace, situation: Situation) -> tuple[tuple[float, int], ...]:
    """The changes of the count that are within the period of a rate, with this one."""
    longest_s = max((each.period_s for each in _rates(situation)), default=0.0)
    now = (situation.at, course.count - situation.count)
    changes = (*situation.memory.changed, now)
    return tuple((at, change) for at, change in changes if change and situation.at - at < longest_s)


def _rates(situation: Situation) -> tuple[ScalingRateLimit, ...]:
    return (*situation.scale.rates_up, *situation.scale.rates_down)


def _allowed(situation: Situation, rates: Sequence[ScalingRateLimit], sign: int) -> tuple[int, str]:
    """How many more replicas may be added (``sign`` 1) or removed (-1) now, and why.

    Of several rates the one that allows the most counts, as with ``selectPolicy: Max`` of Kubernetes'
    Horizontal Pod Autoscaler. Other than there, what was taken back counts too, so that no period has more.
    """
    found = []
    what = "rates_up" if sign > 0 else "rates_down"
    for i, rate in enumerate(rates):
        within = [change for at, change in situation.memory.changed if situation.at - at < rate.period_s]
        made = sum(max(0, sign * change) for change in within)
        part = (rate.fraction or 0.0) * (situation.count - sum(within))
        whole = math.ceil(part - ROUNDING) if sign > 0 else math.floor(part + ROUNDING)
        each = max(1, whole) if rate.replicas is None else rate.replicas
        why = f"{made} of {each} in {rate.period_s:g} s (scale.{what}[{i}])"
        found.append((max(0, each - made), why))
    allowed, why = max(found, key=lambda pair: pair[0])
    # A model at zero is woken all the same.
    return max(allowed, int(sign > 0 and situation.count == 0)), why


def _since_needed(course: GuardrailTrace, situation: Situation) -> float:
    """Since when at least as many as now are needed."""
    before = situation.memory.high_since
    return min((at for count, at in before.items() if count >= course.enough), default=situation.at)


def _needed(course: GuardrailTrace, situation: Situation) -> tuple[int, str]:
    """The count that was needed for all of hold_up_s, and why."""
    hold_s, since = situation.scale.hold_up_s, _since_needed(course, situation)
    highs = {**situation.memory.high_since, course.enough: since}
    long = [count for count, at in highs.items() if situation.at - at >= hold_s and count <= course.enough]
    why = f"{course.enough} needed for {situation.at - since:.0f} of {hold_s:g} s (scale.hold_up_s)"
    return max([situation.count + int(situation.count == 0), *long]), why


def _least(situation: Situation, option: ModeOption) -> tuple[Guardrail, str]:
    """The rule and the reason for the least count of a mode."""
    for key, schedule in schedules_in_force(situation):
        if schedule.min is not None and min(schedule.min, option.most) == option.least:
            return Guardrail.SCHEDULE, f"{key} has at least {schedule.min}"
    return Guardrail.MIN_HEALTHY, f"{option.mode} has at least {option.least}"


def _most(situation: Situation, option: ModeOption) -> tuple[Guardrail, str]:
    """The rule and the reason for the largest count of a mode."""
    for key, schedule in schedules_in_force(situation):
        if schedule.max == option.most:
            return Guardrail.SCHEDULE, f"{key} has at most {schedule.max}"
    return Guardrail.BUDGET, f"{option.mode} has at most {option.most}"


def _healthy(situation: Situation, option: ModeOption, course: GuardrailTrace) -> tuple[int, Guardrail, str]:
    """The minimum count, its rule, and why."""
    if course.by_hand and course.count == 0 == option.least:
        return 0, Guardrail.MIN_HEALTHY, ""
    demand, scale = situation.signals.demand, situation.scale
    queued = demand.queued if demand is not None else 0
    healthy = Guardrail.MIN_HEALTHY
    return max(
        (int(queued > 0 and situation.count == 0), healthy, f"{queued} queued and no replica"),
        (min(max(scale.min_healthy, 1), option.most), healthy, f"scale.min_healthy is {scale.min_healthy}"),
        (option.least, *_least(situation, option)),
        key=lambda found: found[0],
    )


def _held(course: GuardrailTrace, situation: Situation, option: ModeOption) -> tuple[int, str]:
    """The count that hold_s keeps, and why."""
    waits = unsettled(situation)
    if waits:
        return situation.count, waits
    chosen = situation.scale.hold_s
    hold_s = max(option.lead_s, HOLD_S) if chosen == "auto" else chosen
    lows = low_since(course, situation)
    long = [count for count, since in lows.items() if situation.at - since >= hold_s]
    shown = situation.at - lows.get(course.enough, situation.at)
    why = f"{course.enough} enough for {shown:.0f} of {hold_s:g} s (scale.hold_s)"
    return min(long, default=situation.count), why
