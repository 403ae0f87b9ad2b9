"""One pure function from situations to decisions, for all models at once.

Every policy proposes a count. :mod:`policy.scaling.guardrails` limits the live policy's count,
:mod:`policy.scaling.replica_size_mode_selection` says whether a switch of mode pays,
:mod:`policy.scaling.budget_allocation` divides the budget, and the last guardrails bound how fast a count
changes. The same situations, budget and policies give the same decisions, through JSON and back, so a
decision log can be checked by deciding again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from policy.config.control import SloConfig
from policy.config.deployment import ResourceBudget
from policy.engine.performance_model import EngineLoad
from policy.engine.replica_capacity import Capability, capability, idle_latency
from policy.request import ASSUMED_INPUT_TOKENS, ASSUMED_OUTPUT_TOKENS
from policy.scaling.budget_allocation import BudgetClaim, allocate, alone, attainable, held, spare
from policy.scaling.budget_resources import Resources
from policy.scaling.decision_types import (
    Decision,
    DecisionMemory,
    ModeForecast,
    ModeOption,
    Situation,
)
from policy.scaling.guardrails import (
    GuardrailTrace,
    bound_of_policy,
    changed,
    describe,
    high_since,
    limit,
    low_since,
    override_in_force,
    proposed,
    requested,
    scheduled,
)
from policy.scaling.replica_size_mode_selection import (
    PERCENTILE,
    ModeComparison,
    ModeSelection,
    describe_switch,
    expected,
    expected_peak,
)
from policy.scaling.view import Policy, Proposal, View
from policy.signals.types import ModelDemand, Shares
from policy.types import Priority

# How long a count or a switch must lack resources before a lower priority is scaled down for it: a replica
# that is drained for a short peak takes a whole start to come back.
STARVED_S = 10.0


@dataclass(frozen=True, slots=True)
class ModelPolicies:
    """The policies of one model: ``live`` decides, ``shadow`` and ``others`` are only compared."""

    live: Policy
    shadow: Policy | None = None
    others: Mapping[str, Policy] = field(default_factory=dict)


def decide_all(
    situations: Mapping[str, Situation], budget: ResourceBudget, policies: Mapping[str, ModelPolicies]
) -> dict[str, tuple[Decision, DecisionMemory]]:
    """The decision of every model, with the memory that it leaves to the next.

    The budget is divided among the models that are given: all that share it have to be.
    """
    models = {model: _propose(situations[model], policies[model]) for model in sorted(situations)}
    claims = {name: model.claim() for name, model in models.items()}
    for model in models.values():
        model.compare(claims, budget)
    grants = _granted(models, budget)
    return {name: model.conclude(grants[name]) for name, model in models.items()}


def workload_of(demand: ModelDemand | None) -> EngineLoad:
    """The mean request, by those of late; the rate is left open."""
    if demand is None or demand.input_tokens <= 0:
        return EngineLoad(lam=0.0, input_tokens=ASSUMED_INPUT_TOKENS, output_tokens=ASSUMED_OUTPUT_TOKENS)
    # The last prompt token is always computed, and the first token of an answer with it.
    return EngineLoad(
        lam=0.0,
        input_tokens=max(1.0, demand.input_tokens),
        output_tokens=max(1.0, demand.output_tokens),
        hit=max(0.0, min(demand.hit, 1.0 - 1.0 / max(1.0, demand.input_tokens))),
    )


@dataclass(slots=True)
class _ModelDecision:
    """The decision of one model in the making: ``option`` is its current mode, ``to`` that of a switch.

    ``lacks`` is what a postponed switch needs in all.
    """

    situation: Situation
    option: ModeOption
    workload: EngineLoad
    capabilities: dict[str, Capability]
    proposal: Proposal
    shadow: Proposal | None
    others: dict[str, Proposal]
    course: GuardrailTrace
    verdict: ModeSelection = ModeSelection()  # noqa: RUF009 - never changed
    to: ModeOption | None = None
    lacks: Resources | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def forecast(self) -> float:
        """The forecast rate in requests per second, else the recent one."""
        demand, proposal = self.situation.signals.demand, self.proposal
        if demand is None:
            return 0.0
        high = proposal.forecast if proposal.forecast_high is None else proposal.forecast_high
        return max(0.0, demand.arrivals.last_60_s if high is None else high)

    def claim(self) -> BudgetClaim:
        """What the model asks of the budgets."""
        situation, course, option = self.situation, self.course, self.to or self.option
        waits = self._is_long(situation.memory.waits_since)
        return BudgetClaim(
            model=situation.model,
            priority=situation.priority,
            each=option.resources,
            asked=course.count,
            floor=course.floor,
            now=0 if self.to else situation.count,
            held=held(situation),
            replaces=self.to is not None,
            starved=self._is_long(situation.memory.starved_since) or (self.to is not None and waits),
            reserve=self.lacks if self.lacks and waits else Resources(),
        )

    def _is_long(self, since: float | None) -> bool:
        return since is not None and self.situation.at - since >= STARVED_S

    def compare(self, claims: Mapping[str, BudgetClaim], budget: ResourceBudget) -> None:
        """Compare modes, and choose one that is worth a switch or is set manually."""
        situation = self.situation
        if len(situation.mode_options) < 2:
            return
        able = self.capabilities[self.option.mode]
        self.verdict = ModeComparison(
            situation=situation,
            rate=expected(situation, self.forecast, able),
            during=partial(expected_peak, situation, able),
            workload=self.workload,
            capabilities=self.capabilities,
            reach=attainable(situation.model, claims, budget),
            alone=alone(situation.model, claims, budget),
            spare=spare(claims.values(), budget),
            fixed="the policy does not change modes" if self.proposal.fixed else "",
        ).evaluate()
        override, better = override_in_force(situation), self.verdict.to
        if override is not None and override.mode != situation.mode:
            self._switch(next(there for there in self.verdict.mode_forecasts if there.mode == override.mode))
        elif better is not None and override is not None:
            self.notes.append(f"{self._benefit(better)}, but the mode is set manually")
        elif better is not None and situation.count and self.course.count:
            self._switch(better)

    def _benefit(self, there: ModeForecast) -> str:
        here = next(each for each in self.verdict.mode_forecasts if each.mode == self.option.mode)
        return describe_switch(self.situation, here, there)

    def _switch(self, there: ModeForecast) -> None:
        self.to = next(option for option in self.situation.mode_options if option.mode == there.mode)
        self.course = requested(self.situation, self.to, there.count)

    def is_cut(self, grants: Mapping[str, int]) -> bool:
        """Whether the budget grants too little for the switch, or it waits for lower priorities."""
        if self.to is None:
            return False
        manual = override_in_force(self.situation) is not None
        needed = min(1, self.course.count) if manual else self.course.count
        return grants[self.situation.model] < needed or (self.verdict.early and not manual)

    def stay(self, granted: int) -> None:
        """Postpone the switch, for which ``granted`` replicas fit; a dry run claims nothing for it."""
        assert self.to is not None
        note = f"switch to {self.to.mode} waits: it needs {self.course.count}, the budget leaves {granted}"
        if not self.situation.guard.dry_run or self.course.by_hand:
            self.lacks = Resources().plus(self.to.resources, self.course.count)
            if self._is_long(self.situation.memory.waits_since):
                note += ", so lower priorities are scaled down"
        self.notes.append(note)
        self.to = None
        self.course = proposed(self.situation, self.option, self.proposal)

    def conclude(self, granted: int) -> tuple[Decision, DecisionMemory]:
        """The decision with ``granted`` replicas, and the memory for the next."""
        situation, course, option = self.situation, self.course, self.to or self.option
        limit(course, situation, option, granted)
        by_load = self.to is not None and override_in_force(situation) is None
        starved = granted < min(course.enough, option.most)
        short = self._short(option, granted)
        decision = Decision(
            at=situation.at,
            model=situation.model,
            mode=option.mode,
            count=course.count,
            was_mode=situation.mode,
            was_count=situation.count,
            reason=self._reason(option, by_load, short),
            proposal=self.proposal,
            capability=self.capabilities[self.option.mode],
            applied_guardrails=tuple(course.applied_guardrails),
            mode_forecasts=self.verdict.mode_forecasts,
            gain=self.verdict.gain if by_load else None,
            shadow=self.shadow,
            others={name: proposal.count for name, proposal in self.others.items()},
            short=short,
            # A manual override applies in a dry run too.
            dry_run=situation.guard.dry_run and not course.by_hand,
        )
        before = situation.memory
        # A dry run changes nothing.
        switched = self.to is not None and not situation.guard.dry_run
        unchanged = self.to is not None or decision.dry_run
        memory = DecisionMemory(
            at=situation.at,
            policy=self.proposal.memory,
            shadow=None if self.shadow is None else self.shadow.memory,
            others={name: proposal.memory for name, proposal in self.others.items()},
            low_since=low_since(course, situation)
            if self.to is None
            else {}
            if switched
            else before.low_since,
            high_since={} if switched else high_since(course, situation),
            changed=() if switched else before.changed if unchanged else changed(course, situation),
            better_since={} if switched else self.verdict.better_since,
            switched_at=situation.at if switched or _still_switches(situation) else before.switched_at,
            starved_since=_since(before.starved_since, situation.at) if starved else None,
            waits_since=_since(before.waits_since, situation.at) if self.lacks else None,
            queue_clears_by=self.verdict.queue_clears_by,
        )
        return decision, memory

    def _short(self, option: ModeOption, granted: int) -> float:
        """Requests per second that the budget and the bounds leave unserved."""
        course, able = self.course, self.capabilities[option.mode]
        if course.by_hand or (granted >= course.enough and option.most > course.enough):
            return 0.0
        return max(0.0, self.forecast - min(granted, option.most) * (able.mu or able.mu_max))

    def _reason(self, option: ModeOption, by_load: bool, short: float) -> str:
        parts = slo_misses(self.situation)
        applied = self.course.applied_guardrails
        if by_load and self.verdict.to is not None:
            parts.append(self._benefit(self.verdict.to))
        elif self.to is not None:
            parts.append(f"{option.mode} is set manually")
        else:
            if self.situation.count == 0 < self.course.count:
                parts.append("wakes from zero")
            bound = bound_of_policy(self.situation, option, self.proposal)
            parts.append(f"wants {bound.was if bound else self.proposal.count}: {self.proposal.reason}")
            applied = [bound, *applied] if bound else applied
        parts += [describe(each, self.situation.count) for each in applied]
        parts += self.notes
        if self.course.asleep and self.course.asleep not in parts[-1]:
            parts.append(self.course.asleep)
        if short:
            spillover = ", may spill over to upstreams" if self.situation.spillover else ""
            parts.append(f"{short:.2f} req/s over capacity{spillover}")
        return "; ".join(parts)


def slo_misses(situation: Situation) -> list[str]:
    """The SLO targets that the last minute missed, with what was measured."""
    demand, slo = situation.signals.demand, situation.slo
    if demand is None:
        return []
    if situation.slo_by_priority:
        return [
            miss
            for priority, shares in demand.by_priority.items()
            if (wanted := situation.slo_by_priority.get(priority)) is not None
            for miss in _misses_of(priority, shares.met, wanted)
        ]
    measured = (("TTFT", demand.ttft, slo.ttft_p95_s), ("ITL", demand.itl, slo.itl_p95_s))
    return [
        f"SLO missed: {name} p95 {latency.p95 * 1e3:.0f} ms > {target_s * 1e3:.0f} ms"
        for name, latency, target_s in measured
        if latency is not None and target_s is not None and latency.p95 > target_s
    ]


def _misses_of(priority: Priority, met: Shares, slo: SloConfig) -> list[str]:
    """The targets that fewer requests of one priority met than they are for."""
    measured = (("TTFT", met.ttft, slo.ttft_p95_s), ("ITL", met.itl, slo.itl_p95_s))
    return [
        f"SLO of {priority} missed: {name} within {target_s * 1e3:.0f} ms for {share:.0%} < {PERCENTILE:.0%}"
        for name, share, target_s in measured
        if target_s is not None and share < PERCENTILE
    ]


def _still_switches(situation: Situation) -> bool:
    """Whether the last switch is still under way: mode.dwell_s counts from its end."""
    memory = situation.memory
    if memory.switched_at is None or situation.settled or situation.supply.failures:
        return False
    return memory.at is None or memory.switched_at >= memory.at


def _since(earlier: float | None, at: float) -> float:
    return at if earlier is None else earlier


def _current_memory(situation: Situation) -> DecisionMemory:
    """The memory without what is outdated: nothing is known of a time without decisions.

    Instants in the future are of a clock that was set back while no controller ran: policies would take no
    observation for newer than those, and every duration would last until then.
    """
    memory, at = situation.memory, situation.at
    if memory.at is None:
        return memory
    if memory.at > at:
        return DecisionMemory(switched_at=None if memory.switched_at is None else min(memory.switched_at, at))
    if at - memory.at > situation.tick_s + situation.guard.stale_s:
        return msgspec.structs.replace(
            memory,
            low_since={},
            high_since={},
            better_since={},
            starved_since=None,
            waits_since=None,
            queue_clears_by=None,
        )
    return memory


def _propose(situation: Situation, policies: ModelPolicies) -> _ModelDecision:
    """The proposals of the policies, and what the model requests of the budget."""
    memory = _current_memory(situation)
    situation = scheduled(msgspec.structs.replace(situation, memory=memory))
    workload = workload_of(situation.signals.demand)
    option = next(option for option in situation.mode_options if option.mode == situation.mode)
    capabilities = {
        each.mode: capability(each.timing, workload, situation.slo, error=each.error, version=each.version)
        for each in situation.mode_options
    }
    # Spare replicas are none of the policies' business: they would take them for a reason to scale down.
    supply, count = situation.supply, max(0, situation.count - situation.scale.spare)
    serving = min(supply.serving, max(count, supply.serving - situation.scale.spare))
    view = View(
        at=situation.at,
        tick_s=situation.tick_s,
        model=situation.model,
        mode=situation.mode,
        count=count,
        least=option.least,
        most=option.most,
        supply=msgspec.structs.replace(supply, serving=serving),
        signals=situation.signals,
        capability=capabilities[option.mode],
        lead_s=option.lead_s,
        queue_s=situation.queue_s,
        slo=situation.slo,
        idle=idle_latency(option.timing, workload),
    )
    proposal = policies.live.decide(view, memory.policy)
    others = sorted(policies.others.items())
    return _ModelDecision(
        situation=situation,
        option=option,
        workload=workload,
        capabilities=capabilities,
        proposal=proposal,
        shadow=None if policies.shadow is None else policies.shadow.decide(view, memory.shadow),
        others={name: policy.decide(view, memory.others.get(name)) for name, policy in others},
        course=proposed(situation, option, proposal),
    )


def _granted(models: Mapping[str, _ModelDecision], budget: ResourceBudget) -> dict[str, int]:
    """The counts that the budget grants; a switch that cannot get all it needs is postponed."""
    while True:
        grants = allocate([model.claim() for model in models.values()], budget)
        cut = [(model.situation.priority, name) for name, model in models.items() if model.is_cut(grants)]
        if not cut:
            return grants
        _, last = min(cut)
        models[last].stay(grants[last])
