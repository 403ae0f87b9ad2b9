"""One decision on one screen: what was seen, what was asked for, what clipped it, and what it came to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from policy.config.control import SloConfig
from policy.engine.capacity import Capability
from policy.scaling.situation import Decision, Limit, ModeForecast, Situation
from policy.scaling.view import Proposal, Supply
from policy.signals.types import Demand, LatencyQuantiles, ReplicaSample
from serve.controller_api import LoggedDecision
from tidegate.commands.durations import clock
from tidegate.commands.fleet.status_tables import age, describe_switch_block, rate

_LABEL = 9
# Of the engine model's error and of figures' age: past these a reader should look twice.
_BAD_ERROR = 0.2
_SLOW = 1.2
# Phases of a model whose aim was not reached yet.
_ON_THE_WAY = ("starting", "switching", "giving way")


class Aftermath(NamedTuple):
    """What was aimed for after a decision, and what was on the way there (a phase of the controller).

    Of the newest also which modes failed and are ``barred``, until when.
    """

    mode: str
    replicas: int
    phase: str = ""
    barred: Mapping[str, float] = MappingProxyType({})


def render_decision(logged: LoggedDecision, after: Aftermath | None, now: float) -> RenderableType:
    """The whole of one decision; ``after`` is what came then, if it is known, and ``now`` when it is read."""
    decision = logged.decision
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", width=_LABEL, no_wrap=True)
    rows.add_column(overflow="fold")
    for label, *lines in _sections(logged, after, now):
        for i, line in enumerate(lines):
            rows.add_row("" if i else label, line)
    return Group(_headline(decision, now), rows)


def _headline(decision: Decision, now: float) -> Text:
    before = f"{decision.was_mode} x {decision.was_count}"
    if not decision.changes:
        what = Text(f"{before}, as before")
    else:
        what = Text(f"{before} -> {decision.mode} x {decision.count}", style="bold green")
    when = f"  {clock(decision.at, now)} ({age(now - decision.at)} ago)  "
    return Text.assemble((decision.model, "bold"), when, what)


def _sections(
    logged: LoggedDecision, after: Aftermath | None, now: float
) -> Iterable[tuple[str | RenderableType, ...]]:
    situation, decision = logged.situation, logged.decision
    signals, slo = situation.signals, situation.slo
    yield "because", decision.reason
    yield "outcome", _outcome(logged, after, now)
    yield "demand", *_demand(signals.demand, situation.guard.stale_s)
    if signals.demand is not None:
        yield "latency", _latency(signals.demand, slo)
        yield "requests", _lengths(signals.demand)
    yield "supply", _supply(situation.supply, _lead_s(situation))
    if signals.replicas:
        yield "replicas", *_replicas(signals.replicas, situation.guard.stale_s)
    yield "capacity", _capability(decision.capability, decision.was_mode, slo)
    yield "policy", *_proposal(decision.proposal)
    yield "rules", *(_clips(decision.clips) or ("none changed that",))
    if len(decision.outlooks) > 1:
        yield "modes", _outlooks(decision)
    if after is not None and after.barred:
        yield "barred", *(describe_switch_block(mode, until, now) for mode, until in after.barred.items())
    if others := _others(decision):
        yield "others", *others


def _outcome(logged: LoggedDecision, after: Aftermath | None, now: float) -> Text:
    situation, decision = logged.situation, logged.decision
    said = Text()
    if decision.dry_run and decision.changes:
        said.append("not carried out (control.guard.dry_run)", style="yellow")
    elif not decision.changes:
        said.append("nothing to do")
    elif after is None:
        said.append("what came of it is not known")
    elif (after.mode, after.replicas) == (decision.mode, decision.count):
        on_its_way = after.phase in _ON_THE_WAY
        said.append(f"on its way ({after.phase})" if on_its_way else "carried out")
    else:
        said.append("not carried out; `tidegate status --json` has the events", style="yellow")
    if decision.gain is not None:
        said.append(f"; the switch promises to cost {decision.gain:.0%} less", style="green")
    if (came := logged.outcome) is not None:
        less = f"{abs(came.measured):.0%} {'more' if came.measured < 0 else 'less'}"
        said.append(
            f", and was measured to cost {less}: {came.met_before:.1%} within the objective before,"
            f" {came.met:.1%} since",
            style="green" if came.measured > 0 else "yellow",
        )
    if (override := situation.override) is not None:
        until = f"until {clock(override.until, now)}" if override.until is not None else "until taken back"
        what = override.mode if override.count is None else f"{override.mode} x {override.count}"
        said.append(f"; by hand: {what} {until}", style="yellow")
    if decision.short:
        where = "left to upstreams" if situation.overflow else "left unserved"
        said.append(f"; {rate(decision.short)} are {where}", style="yellow")
    return said


def _demand(demand: Demand | None, stale_s: float) -> Iterable[Text]:
    if demand is None:
        yield Text("no gateway has told anything yet", style="yellow")
        return
    arrivals = demand.arrivals
    yield Text(
        f"{rate(arrivals.last_20_s)} arrive over 20 s, {rate(arrivals.last_60_s)} over 60 s;"
        f" {rate(demand.refused.last_20_s)} refused; {demand.concurrency.last_20_s:.1f} at once"
    )
    queue = f"{demand.queued} queued"
    queue += f", the oldest for {age(demand.oldest_s)}; " if demand.queued else "; "
    idle = f"nobody has asked for {age(demand.idle_s)}; " if not arrivals.last_20_s else ""
    yield Text.assemble(queue, idle, _aged(demand.age_s, stale_s))


def _latency(demand: Demand, slo: SloConfig) -> Text:
    said = Text.assemble(
        _quantile("TTFT", demand.ttft, slo.ttft_p95_s), "; ", _quantile("ITL", demand.itl, slo.itl_p95_s)
    )
    if slo.ttft_p95_s or slo.itl_p95_s:
        good = demand.met.both >= slo.attainment
        said.append("; ")
        said.append(f"{demand.met.both:.1%}", style="" if good else "red")
        said.append(f" within both (promised {slo.attainment * 100:.4g}%)")
    return said


def _quantile(name: str, measured: LatencyQuantiles | None, promised_s: float | None) -> Text:
    said = Text(f"{name} p95 ")
    if measured is None:
        said.append("not measured")
    else:
        missed = promised_s is not None and measured.p95 > promised_s
        said.append(_span(measured.p95), style="red" if missed else "")
    if promised_s is not None:
        said.append(f" (promised {_span(promised_s)})")
    return said


def _lengths(demand: Demand) -> str:
    if not demand.input_tokens and not demand.output_tokens:
        return "none has ended in ten minutes"
    cached = f"{demand.hit:.0%} of them cached"
    return f"{demand.input_tokens:.0f} tokens in, {cached}, {demand.output_tokens:.0f} out"


def _supply(supply: Supply, lead_s: float) -> Text:
    said = Text(f"{supply.serving} of {supply.wanted} serving")
    if supply.starting_s:
        ready = ", ".join(age(each) for each in sorted(supply.starting_s))
        said.append(f"; {len(supply.starting_s)} starting, ready in {ready}")
    if supply.draining:
        said.append(f"; {supply.draining} leaving")
    said.append(f"; a start takes {age(lead_s)}")
    if supply.failures:
        said.append(f"; {supply.failures} starts failed in a row", style="red")
    return said


def _lead_s(situation: Situation) -> float:
    return next((rung.lead_s for rung in situation.rungs if rung.mode == situation.mode), 0.0)


def _replicas(replicas: Sequence[ReplicaSample], stale_s: float) -> Iterable[Text]:
    running, waiting = sum(each.running for each in replicas), sum(each.waiting for each in replicas)
    deferred = sum(each.deferred for each in replicas)
    preempted = sum(each.preempted_per_s for each in replicas)
    said = Text(f"KV {_spread([each.kv_used for each in replicas], '{:.0%}')}; {running} run, {waiting} wait")
    if deferred:
        said.append(f", {deferred} of them for an adapter's slot", style="yellow")
    if preempted:
        said.append(f"; {rate(preempted)} lost their KV", style="yellow")
    said.append("; ")
    said.append(_aged(max(each.age_s for each in replicas), stale_s))
    yield said
    slow = [each for each in replicas if each.slowness >= _SLOW or each.throttled]
    for each in slow:
        why = f" ({each.throttled})" if each.throttled else ""
        yield Text(
            f"{each.id} takes {each.slowness:.2f} times as long as its model says{why}", style="yellow"
        )
    watts = [each.watts for each in replicas if each.watts is not None]
    celsius = [each.celsius for each in replicas if each.celsius is not None]
    if watts:
        hottest = f", the hottest card has {max(celsius):.0f} C" if celsius else ""
        yield Text(f"{sum(watts):.0f} W together{hottest}")


def _capability(capability: Capability, mode: str, slo: SloConfig) -> Text:
    promised = slo.ttft_p95_s is not None or slo.itl_p95_s is not None
    if promised and not capability.mu:
        takes = f"one replica of {mode} cannot meet the objective; {rate(capability.mu_max)} at most"
    elif promised:
        takes = f"one replica of {mode} takes {rate(capability.mu)} within the objective,"
        takes += f" {rate(capability.mu_max)} at most"
    else:
        takes = f"one replica of {mode} takes {rate(capability.mu)}"
    said = Text(takes + "; ")
    if capability.version:
        said.append(f"engine model v{capability.version}")
        said.append(f" errs {capability.error:.0%}", style="yellow" if capability.error > _BAD_ERROR else "")
    else:
        said.append("engine model as shipped", style="yellow")
    return said


def _proposal(proposal: Proposal) -> Iterable[str]:
    yield f"asks for {proposal.count}: {proposal.reason}"
    if proposal.terms:
        yield "in replicas: " + ", ".join(f"{name} {value:.2f}" for name, value in proposal.terms.items())
    if proposal.forecast is not None:
        high = f", {rate(proposal.forecast_high)} at most" if proposal.forecast_high is not None else ""
        yield f"expects {rate(proposal.forecast)}{high}, when a start begun now is ready"


def _clips(clips: Sequence[Limit]) -> tuple[Text, ...]:
    return tuple(
        Text.assemble((f"{clip.rule}", "bold"), f" {clip.was} -> {clip.now}: {clip.why}") for clip in clips
    )


def _outlooks(decision: Decision) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("mode", "replicas", "cost", "met", "TTFT p95", "ITL p95"):
        table.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    table.add_column("")
    for outlook in decision.outlooks:
        table.add_row(*_outlook(outlook, taken=outlook.mode == decision.mode))
    return table


def _outlook(outlook: ModeForecast, *, taken: bool) -> tuple[RenderableType, ...]:
    return (
        Text(outlook.mode, style="bold" if taken else ""),
        str(outlook.count),
        f"{outlook.cost:.2f}",
        f"{outlook.met:.0%}",
        "-" if outlook.ttft_s is None else _span(outlook.ttft_s),
        "-" if outlook.itl_s is None else _span(outlook.itl_s),
        Text(outlook.why, style="dim"),
    )


def _others(decision: Decision) -> list[str]:
    said = []
    if (shadow := decision.shadow) is not None:
        said.append(f"the shadow would ask for {shadow.count}: {shadow.reason}")
    if decision.others:
        said.append(", ".join(f"{name} {count}" for name, count in sorted(decision.others.items())))
    return said


def _aged(age_s: float, stale_s: float) -> Text:
    return Text(f"told {age(age_s)} ago", style="red" if age_s > stale_s else "dim")


def _spread(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _span(seconds: float) -> str:
    """A latency: short ones in milliseconds."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
