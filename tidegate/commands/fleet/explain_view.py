"""One decision as text: the verdict, the metrics, the policy's proposal, its limits and the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from policy.config.control import SloConfig
from policy.engine.replica_capacity import Capability, idle_latency
from policy.scaling.decide import slo_misses, workload_of
from policy.scaling.decision_types import AppliedGuardrail, Decision, Guardrail, ModeOverride, Situation
from policy.scaling.guardrails import bound_of_policy, override_in_force, scheduled
from policy.scaling.switch_cost import describe_gain
from policy.scaling.view import Proposal
from policy.signals.types import LatencyQuantiles, ModelDemand, ReplicaSample
from serve.controller_api_schema import LoggedDecision
from tidegate.commands.fleet.status import describe_switch_block
from tidegate.commands.terminal import table
from tidegate.commands.units import age, clock, latency, optional, plural, rate

_LABEL = 9
# Highlighted above these: the relative error of the performance model, and step time over its prediction.
_BAD_ERROR = 0.2
_SLOW = 1.2
# Phases of a model that has not reached its goal yet.
_IN_PROGRESS = ("starting", "switching", "giving way")
_LIMITED = {
    Guardrail.SPARE: "raised to",
    Guardrail.OVERRIDE: "overridden to",
    Guardrail.STALENESS: "kept at",
    Guardrail.MIN_HEALTHY: "kept at",
    Guardrail.SCHEDULE: "bounded to",
    Guardrail.BUDGET: "capped at",
    Guardrail.STEP: "limited to",
    Guardrail.RATE: "limited to",
    Guardrail.HOLD: "kept at",
}


class DecisionRollout(NamedTuple):
    """The goal after a decision, the ``phase`` on the way there, and failed modes with their retry time."""

    mode: str
    replicas: int
    phase: str = ""
    barred: Mapping[str, float] = MappingProxyType({})


def verdict(logged: LoggedDecision, now: float) -> Text:
    """Whether the model meets its SLO, and what was decided, in one line."""
    situation, decision = logged.situation, logged.decision
    state, style = _state(situation, now)
    text = Text.assemble((decision.model, "bold"), "  ", (state, style), f"; {_scaling(situation, decision)}")
    if decision.short:
        text.append(f"; {_unserved(situation, decision)}")
    if decision.dry_run:
        text.append(" (dry run: not applied)")
    return text


def _state(situation: Situation, now: float) -> tuple[str, str]:
    if (override := override_in_force(situation)) is not None:
        return f"Manual override: {_override(override, now)}", "yellow"
    demand, slo = situation.signals.demand, situation.slo
    if demand is None:
        return "No metrics: no gateway has reported yet", "yellow"
    if not (demand.queued or demand.arrivals.last_60_s or demand.concurrency.last_20_s):
        return f"Idle: no requests in {age(demand.idle_s)}", ""
    if slo.ttft_p95_s is None and slo.itl_p95_s is None:
        return f"No SLO set: {rate(demand.arrivals.last_20_s)} requests", ""
    if situation.slo_by_priority and demand.by_priority:
        missed = slo_misses(situation)
        return ("; ".join(missed), "red") if missed else ("SLO of each priority met", "green")
    latencies = (("TTFT", demand.ttft, slo.ttft_p95_s), ("ITL", demand.itl, slo.itl_p95_s))
    measured = [
        (name, quantiles.p95, limit)
        for name, quantiles, limit in latencies
        if quantiles is not None and limit is not None
    ]
    if not measured:
        return "SLO not measured yet", ""
    if late := [each for each in measured if each[1] > each[2]]:
        return f"SLO missed: {', '.join(_compared(*each, '>') for each in late)}", "red"
    if demand.met.both < slo.attainment:
        share, target = _share(demand.met.both), _share(slo.attainment)
        return f"SLO missed: {share} of requests within the latency targets < {target}", "red"
    return f"SLO met: {', '.join(_compared(*each, '<=') for each in measured)}", "green"


def _compared(name: str, measured_s: float, limit_s: float, sign: str) -> str:
    measured, limit = latency(measured_s), latency(limit_s)
    if measured == limit and measured_s > limit_s:  # equal after rounding
        measured = f"{measured_s * 1000:.1f} ms" if measured_s < 1 else f"{measured_s:.3f} s"
    return f"{name} p95 {measured} {sign} {limit}"


def _scaling(situation: Situation, decision: Decision) -> str:
    """What the decision does, and what limited it."""
    count = decision.count
    if decision.mode != decision.was_mode:
        return f"switches from {decision.was_mode} x {decision.was_count} to {decision.mode} x {count}"
    applied = _limits(situation, decision)
    if applied and applied[0].was != count:
        rule = applied[-1].rule
        return f"wants {plural(applied[0].was, 'replica')}, {_LIMITED[rule]} {count} ({rule})"
    if decision.was_count == 0 < count:
        return f"wakes from zero: scales to {plural(count, 'replica')}"
    if decision.changes:
        return f"scales from {decision.was_count} to {plural(count, 'replica')}"
    return f"keeps {plural(count, 'replica')}"


def _limits(situation: Situation, decision: Decision) -> list[AppliedGuardrail]:
    """The bound that the policy applied itself, and what changed its count after that."""
    bounded = scheduled(situation)
    option = next((each for each in bounded.mode_options if each.mode == decision.was_mode), None)
    own = option and bound_of_policy(bounded, option, decision.proposal)
    return [*([own] if own and decision.mode == decision.was_mode else []), *decision.applied_guardrails]


def _unserved(situation: Situation, decision: Decision) -> str:
    where = "go to fallback providers" if situation.spillover else "exceed the capacity"
    return f"{rate(decision.short)} {where}"


def _override(override: ModeOverride, now: float) -> str:
    what = override.mode if override.count is None else f"{override.mode} x {override.count}"
    return what if override.until is None else f"{what} until {clock(override.until, now)}"


def render_decision(logged: LoggedDecision, after: DecisionRollout | None, now: float) -> RenderableType:
    """One decision; ``after`` is the goal that followed, if known, and ``now`` the reader's Unix time."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", width=_LABEL, no_wrap=True)
    rows.add_column(overflow="fold")
    for label, *lines in _sections(logged, after, now):
        for i, line in enumerate(lines):
            rows.add_row("" if i else label, line)
    return Group(_headline(logged.decision, now), rows)


def _headline(decision: Decision, now: float) -> Text:
    before = f"{decision.was_mode} x {decision.was_count}"
    if not decision.changes:
        change = Text(f"{before}, unchanged")
    else:
        change = Text(f"{before} -> {decision.mode} x {decision.count}", style="bold green")
    when = f"  {clock(decision.at, now)} ({age(now - decision.at)} ago)  "
    return Text.assemble((decision.model, "bold"), when, change)


def _sections(
    logged: LoggedDecision, after: DecisionRollout | None, now: float
) -> Iterable[tuple[str | RenderableType, ...]]:
    situation, decision = logged.situation, logged.decision
    signals, slo = situation.signals, situation.slo
    yield "because", decision.reason
    yield "outcome", _outcome(logged, after, now)
    yield "demand", *_demand(signals.demand, situation.guard.stale_s)
    if signals.demand is not None:
        yield "latency", _latency(signals.demand, slo), *_by_priority(situation, signals.demand)
        yield "requests", _lengths(signals.demand)
    yield "supply", _supply(situation)
    if drains := _draining(situation, decision):
        yield "draining", drains
    if signals.replicas:
        yield "replicas", *_replicas(signals.replicas, situation.guard.stale_s)
    yield "capacity", _capacity(decision.capability, decision.was_mode, slo)
    if missed := _missed_alone(situation):
        yield "SLO", missed
    yield "policy", *_proposal(decision.proposal)
    limits = [
        Text.assemble((str(limit.rule), "bold"), f" {limit.was} -> {limit.now}: {limit.why}")
        for limit in _limits(situation, decision)
    ]
    yield "limits", *(limits or [Text("none applied")])
    if len(decision.mode_forecasts) > 1:
        yield "modes", _modes(decision)
        yield "switch", *_switches(decision)
    if after is not None and after.barred:
        yield "blocked", *(describe_switch_block(mode, until, now) for mode, until in after.barred.items())
    if (shadow := decision.shadow) is not None:
        yield "others", f"shadow policy: desired replicas {shadow.count}: {shadow.reason}"
    if decision.others:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(decision.others.items()))
        yield "others" if shadow is None else "", f"desired replicas: {counts}"


def _outcome(logged: LoggedDecision, after: DecisionRollout | None, now: float) -> Text:
    situation, decision = logged.situation, logged.decision
    text = Text()
    if decision.dry_run and decision.changes:
        text.append("not applied (control.guard.dry_run)", style="yellow")
    elif not decision.changes:
        text.append("no change")
    elif after is None:
        text.append("unknown")
    elif (after.mode, after.replicas) == (decision.mode, decision.count):
        text.append(f"in progress ({after.phase})" if after.phase in _IN_PROGRESS else "applied")
    else:
        text.append("not applied; see the events in `tidegate status --json`", style="yellow")
    if decision.gain is not None:
        text.append(f"; predicted gain of the switch: {decision.gain:.0%}", style="green")
    if (review := logged.outcome) is not None:
        text.append(
            f", measured: {describe_gain(review.measured)}; {_share(review.met_before)} of requests within"
            f" the SLO before, {_share(review.met)} since",
            style="green" if review.measured > 0 else "yellow",
        )
    if (override := situation.override) is not None:
        text.append(f"; manual override: {_override(override, now)}", style="yellow")
    if decision.short:
        text.append(f"; {_unserved(situation, decision)}", style="yellow")
    return text


def _demand(demand: ModelDemand | None, stale_s: float) -> Iterable[Text]:
    if demand is None:
        yield Text("no gateway has reported yet", style="yellow")
        return
    arrivals = demand.arrivals
    yield Text(
        f"{rate(arrivals.last_20_s)} arrivals over 20 s, {rate(arrivals.last_60_s)} over 60 s;"
        f" {rate(demand.refused.last_20_s)} rejected; {demand.concurrency.last_20_s:.1f} concurrent requests"
    )
    queue = f"{demand.queued} queued" + (f", oldest {age(demand.oldest_s)}; " if demand.queued else "; ")
    idle = f"no requests in {age(demand.idle_s)}; " if not arrivals.last_20_s else ""
    yield Text.assemble(queue, idle, _updated(demand.age_s, stale_s))


def _latency(demand: ModelDemand, slo: SloConfig) -> Text:
    text = Text.assemble(
        _quantile("TTFT", demand.ttft, slo.ttft_p95_s), "; ", _quantile("ITL", demand.itl, slo.itl_p95_s)
    )
    if slo.ttft_p95_s or slo.itl_p95_s:
        text.append("; ")
        text.append(_share(demand.met.both), style="" if demand.met.both >= slo.attainment else "red")
        text.append(f" of requests within the SLO (target {slo.attainment * 100:.4g}%)")
    return text


def _by_priority(situation: Situation, demand: ModelDemand) -> Iterable[Text]:
    for priority, shares in demand.by_priority.items():
        slo = situation.slo_by_priority.get(priority)
        if slo is None:
            continue
        style = "" if shares.met.both >= slo.attainment else "red"
        text = Text.assemble(f"{priority}: ", (_share(shares.met.both), style))
        targets = (("TTFT", slo.ttft_p95_s), ("ITL", slo.itl_p95_s))
        limits = ", ".join(f"{name} {latency(limit)}" for name, limit in targets if limit is not None)
        yield text.append(f" of {plural(shares.judged, 'stream')} within its SLO ({limits or 'no target'})")


def _quantile(name: str, measured: LatencyQuantiles | None, slo_s: float | None) -> Text:
    slo = "" if slo_s is None else f" (SLO {latency(slo_s)})"
    if measured is None:
        return Text(f"{name} p95 not measured{slo}")
    style = "red" if slo_s is not None and measured.p95 > slo_s else ""
    return Text.assemble(f"{name} p95 ", (latency(measured.p95), style), slo)


def _lengths(demand: ModelDemand) -> str:
    if not demand.input_tokens and not demand.output_tokens:
        return "none in the last 10 min"
    return (
        f"mean {demand.input_tokens:.0f} input tokens ({demand.hit:.0%} cached),"
        f" {demand.output_tokens:.0f} output tokens"
    )


def _supply(situation: Situation) -> Text:
    supply = situation.supply
    text = Text(f"{supply.serving} of {supply.wanted} desired replicas ready")
    if supply.starting_s:
        ready = ", ".join(age(each) for each in sorted(supply.starting_s))
        text.append(f"; {len(supply.starting_s)} starting, ready in {ready}")
    if supply.draining:
        text.append(f"; {supply.draining} draining")
    start_up_s = next((each.lead_s for each in situation.mode_options if each.mode == situation.mode), 0.0)
    text.append(f"; start-up time {age(start_up_s)}")
    if supply.failures:
        text.append(f"; {supply.failures} starts failed in a row", style="red")
    return text


def _draining(situation: Situation, decision: Decision) -> str:
    """The replicas that a switch leaves behind, and how long their requests have."""
    leaving = dict(situation.leaving)
    if decision.mode != decision.was_mode and not decision.dry_run:
        leaving[decision.was_mode] = decision.was_count
    replicas = ", ".join(f"{plural(count, 'replica')} of {mode}" for mode, count in sorted(leaving.items()))
    limit = f"whose requests have {age(situation.switching.drain_timeout_s)} to end (mode.drain_timeout_s)"
    return f"{replicas}, {limit}" if replicas else ""


def _replicas(replicas: Sequence[ReplicaSample], stale_s: float) -> Iterable[Text]:
    running, waiting = sum(each.running for each in replicas), sum(each.waiting for each in replicas)
    deferred = sum(each.deferred for each in replicas)
    preempted = sum(each.preempted_per_s for each in replicas)
    kv_used = sorted(each.kv_used for each in replicas)
    low, high = f"{kv_used[0]:.0%}", f"{kv_used[-1]:.0%}"
    used = low if low == high else f"{low} to {high}"
    text = Text(f"KV cache {used} used; {running} running, {waiting} waiting")
    if deferred:
        text.append(f" ({deferred} for an adapter slot)", style="yellow")
    if preempted:
        text.append(f"; {rate(preempted)} preempted", style="yellow")
    yield Text.assemble(text, "; ", _updated(max(each.age_s for each in replicas), stale_s))
    for each in replicas:
        if each.slowness >= _SLOW or each.throttled:
            why = f" ({each.throttled})" if each.throttled else ""
            yield Text(f"{each.id}: steps take {each.slowness:.2f}x the predicted time{why}", style="yellow")
    if watts := [each.watts for each in replicas if each.watts is not None]:
        celsius = [each.celsius for each in replicas if each.celsius is not None]
        hottest = f", hottest GPU {max(celsius):.0f} °C" if celsius else ""
        yield Text(f"power {sum(watts):.0f} W{hottest}")


def _capacity(capability: Capability, mode: str, slo: SloConfig) -> Text:
    capacity, most = f"{rate(capability.mu)} per replica of {mode}", rate(capability.mu_max)
    if slo.ttft_p95_s is None and slo.itl_p95_s is None:
        text = Text(f"{capacity}; ")
    elif capability.mu:
        text = Text(f"{capacity} within the SLO, max {most}; ")
    else:
        text = Text(f"a replica of {mode} cannot meet the SLO, max {most}; ")
    if capability.version:
        text.append(f"performance model v{capability.version}, ")
        text.append(f"error {capability.error:.0%}", style="yellow" if capability.error > _BAD_ERROR else "")
    else:
        text.append("performance model not calibrated", style="yellow")
    return text


def _missed_alone(situation: Situation) -> str:
    """The targets that the mean request misses on an idle replica, so that no count meets them."""
    timing = next((each.timing for each in situation.mode_options if each.mode == situation.mode), None)
    if timing is None:
        return ""
    load = workload_of(situation.signals.demand)
    missed = [
        f"{name} {latency(alone_s)} > {latency(limit_s)}"
        for name, alone_s, limit_s in idle_latency(timing, load).missed(situation.slo)
    ]
    size = f"{load.input_tokens:.0f} prompt and {load.output_tokens:.0f} output tokens"
    return f"the mean request ({size}) misses it on an idle replica: {', '.join(missed)}" if missed else ""


def _proposal(proposal: Proposal) -> Iterable[str]:
    yield f"desired replicas {proposal.count}: {proposal.reason}"
    if proposal.terms:
        terms = ", ".join(f"{name} {value:.2f}" for name, value in proposal.terms.items())
        yield f"terms, in replicas: {terms}"
    if proposal.forecast is not None:
        high = f", upper bound {rate(proposal.forecast_high)}" if proposal.forecast_high is not None else ""
        yield f"forecast {rate(proposal.forecast)}{high}, for when a replica started now is ready"


def _modes(decision: Decision) -> Table:
    return table(
        decision.mode_forecasts,
        ("mode", lambda mode: Text(mode.mode, style="bold" if mode.mode == decision.mode else "")),
        (">replicas", lambda mode: mode.count),
        (">cost", lambda mode: f"{mode.cost:.2f}"),
        (">within SLO", lambda mode: f"{mode.met:.0%}"),
        (">TTFT p95", lambda mode: optional(mode.ttft_s, latency)),
        (">ITL p95", lambda mode: optional(mode.itl_s, latency)),
        ("note", lambda mode: Text(mode.why, style="dim")),
    )


def _switches(decision: Decision) -> Iterable[str]:
    """What a switch to each other mode takes from requests."""
    for mode in decision.mode_forecasts:
        if (cost := mode.switch) is None:
            continue
        parts = [f"gap {cost.gap_s:.0f} s"] if cost.gap_s else [f"drain {cost.drain_s:.0f} s"]
        if cost.speed < 1:
            parts.append(f"engines at {cost.speed:.0%} of their speed while others start or drain")
        if cost.refill_s >= 1:
            parts.append(f"cached prompts again {cost.refill_s:.0f} s")
        if cost.queued >= 1:
            ends = (cost.clears_s, cost.clears_after_s)
            now, then = ("never" if at_s is None else f"in {at_s:.0f} s" for at_s in ends)
            parts.append(f"queue of {cost.queued:.0f} clears {now}, {then} with the switch")
        waits = f"requests wait {cost.taken_s:.0f} s of the {cost.lasts_s:.0f} s"
        yield f"to {mode.mode}: {waits}; {', '.join(parts)}"


def _updated(age_s: float, stale_s: float) -> Text:
    return Text(f"updated {age(age_s)} ago", style="red" if age_s > stale_s else "dim")


def _share(fraction: float) -> str:
    return f"{fraction:.1%}"
