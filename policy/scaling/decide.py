"""One pure function from situations to decisions, for all models at once.

Every policy proposes a count. :mod:`policy.scaling.guardrails` limits the live policy's count,
:mod:`policy.scaling.mode_selection` says whether a switch of mode pays,
:mod:`policy.scaling.budget_allocation` divides the budget, and the last guardrails bound how fast a count
changes. The same situations, budget and policies give the same decisions, through JSON and back, so a
decision log can be checked by deciding again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from policy.config.deployment import Budget
from policy.engine.performance_model import Workload
from policy.engine.replica_capacity import Capability, capability
from policy.request import ASSUMED_OUTPUT_TOKENS
from policy.scaling.budget_allocation import Allocation, Claim, allocate, alone, attainable, each, held, spare
from policy.scaling.decision_types import Decision, Limit, Memory, ModeForecast, ModeOption, Situation
from policy.scaling.guardrails import GuardrailTrace, allowed, asked, eased, override_in_force
from policy.scaling.mode_selection import Candidate, Verdict, evaluate, expected, expected_peak
from policy.scaling.view import Policy, Proposal, View
from policy.signals.types import Demand

# The assumed lengths of requests until one has ended: a question with context, and a short answer.
ASSUMED_INPUT_TOKENS = 512.0
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
    situations: Mapping[str, Situation], budget: Budget, minds: Mapping[str, ModelPolicies]
) -> dict[str, tuple[Decision, Memory]]:
    """The decision of every model, with the memory that it leaves to the next.

    The budget is divided among the models that are given: all that share it have to be.
    """
    thoughts = {model: _think(situations[model], minds[model]) for model in sorted(situations)}
    wants = {model: thought.want() for model, thought in thoughts.items()}
    for thought in thoughts.values():
        thought.compare(wants, budget)
    grants = _allotted(thoughts, budget)
    return {model: thought.conclude(grants[model]) for model, thought in thoughts.items()}


def workload_of(demand: Demand | None) -> Workload:
    """The mean request, by those that ended recently; the rate is left open."""
    if demand is None or demand.input_tokens <= 0:
        return Workload(lam=0.0, input_tokens=ASSUMED_INPUT_TOKENS, output_tokens=ASSUMED_OUTPUT_TOKENS)
    # The last prompt token is always computed, and the first token of an answer with it.
    return Workload(
        lam=0.0,
        input_tokens=max(1.0, demand.input_tokens),
        output_tokens=max(1.0, demand.output_tokens),
        hit=max(0.0, min(demand.hit, 1.0 - 1.0 / max(1.0, demand.input_tokens))),
    )


@dataclass(slots=True)
class _Proposal:
    """The decision of one model in the making."""

    situation: Situation
    rung: ModeOption
    workload: Workload
    capabilities: dict[str, Capability]
    proposal: Proposal
    shadow: Proposal | None
    others: dict[str, Proposal]
    course: GuardrailTrace
    verdict: Verdict = Verdict()  # noqa: RUF009 - never changed
    to: ModeOption | None = None
    # What a postponed switch needs in all.
    lacks: Allocation | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def foreseen(self) -> float:
        """The forecast rate in requests per second, else the recent one."""
        demand, proposal = self.situation.signals.demand, self.proposal
        if demand is None:
            return 0.0
        foreseen = proposal.forecast if proposal.forecast_high is None else proposal.forecast_high
        return max(0.0, demand.arrivals.last_60_s if foreseen is None else foreseen)

    def want(self) -> Claim:
        """What the model asks of the budgets."""
        situation, course, rung = self.situation, self.course, self.to or self.rung
        waits = self._long(situation.memory.waits_since)
        return Claim(
            model=situation.model,
            priority=situation.priority,
            each=each(rung),
            asked=course.count,
            floor=course.floor,
            now=0 if self.to else situation.count,
            held=held(situation),
            replaces=self.to is not None,
            starved=self._long(situation.memory.starved_since) or (self.to is not None and waits),
            claim=self.lacks if self.lacks and waits else Allocation(),
        )

    def _long(self, since: float | None) -> bool:
        return since is not None and self.situation.at - since >= STARVED_S

    def compare(self, wants: Mapping[str, Claim], budget: Budget) -> None:
        """Compare modes, and choose one that is worth a switch or is set manually."""
        situation = self.situation
        if len(situation.rungs) < 2:
            return
        prospect = Candidate(
            rate=expected(situation, self.foreseen, self.capabilities[self.rung.mode]),
            during=partial(expected_peak, situation, self.capabilities[self.rung.mode]),
            workload=self.workload,
            capabilities=self.capabilities,
            reach=attainable(situation.model, wants, budget),
            alone=alone(situation.model, wants, budget),
            spare=spare(wants.values(), budget),
            fixed="the policy does not change modes" if self.proposal.fixed else "",
        )
        self.verdict = evaluate(situation, prospect)
        hand, found = override_in_force(situation), self.verdict.to
        if hand is not None and hand.mode != situation.mode:
            self._set_out(next(seen for seen in self.verdict.outlooks if seen.mode == hand.mode))
        elif found is not None and hand is not None:
            self.notes.append(
                f"{found.mode} would cost {self.verdict.gain:.0%} less, but the mode is set manually"
            )
        elif found is not None and situation.count and self.course.count:
            self._set_out(found)

    def _set_out(self, outlook: ModeForecast) -> None:
        self.to = next(rung for rung in self.situation.rungs if rung.mode == outlook.mode)
        self.course = asked(self.situation, self.to, outlook.count)

    def is_cut(self, grants: Mapping[str, int]) -> bool:
        """Whether the budget grants too little for the switch, or it waits for lower priorities."""
        if self.to is None:
            return False
        by_hand = override_in_force(self.situation) is not None
        needed = min(1, self.course.count) if by_hand else self.course.count
        return grants[self.situation.model] < needed or (self.verdict.early and not by_hand)

    def stay(self, granted: int) -> None:
        """Postpone the switch, for which ``granted`` replicas fit; a dry run claims nothing for it."""
        assert self.to is not None
        said = f"switch to {self.to.mode} waits: it needs {self.course.count}, the budget leaves {granted}"
        if not self.situation.guard.dry_run or self.course.by_hand:
            self.lacks = Allocation().plus(each(self.to), self.course.count)
            if self._long(self.situation.memory.waits_since):
                said += ", so lower priorities are scaled down"
        self.notes.append(said)
        self.to = None
        self.course = asked(self.situation, self.rung, self.proposal.count)

    def conclude(self, granted: int) -> tuple[Decision, Memory]:
        """The decision with ``granted`` replicas, and the memory for the next."""
        situation, course, rung = self.situation, self.course, self.to or self.rung
        allowed(course, situation, rung, granted)
        by_load = self.to is not None and override_in_force(situation) is None
        starved = granted < min(course.enough, rung.most)
        short = self._short(rung, granted)
        decision = Decision(
            at=situation.at,
            model=situation.model,
            mode=rung.mode,
            count=course.count,
            was_mode=situation.mode,
            was_count=situation.count,
            reason=self._reason(rung, by_load, short),
            proposal=self.proposal,
            capability=self.capabilities[self.rung.mode],
            clips=tuple(course.clips),
            outlooks=self.verdict.outlooks,
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
        memory = Memory(
            at=situation.at,
            policy=self.proposal.memory,
            shadow=None if self.shadow is None else self.shadow.memory,
            others={name: proposal.memory for name, proposal in self.others.items()},
            low_since=eased(course, situation) if self.to is None else {} if switched else before.low_since,
            better_since={} if switched else self.verdict.better_since,
            switched_at=situation.at if switched or _still_switches(situation) else before.switched_at,
            starved_since=_since(before.starved_since, situation.at) if starved else None,
            waits_since=_since(before.waits_since, situation.at) if self.lacks else None,
        )
        return decision, memory

    def _short(self, rung: ModeOption, granted: int) -> float:
        """Requests per second that the budget and the bounds leave unserved."""
        course, able = self.course, self.capabilities[rung.mode]
        if course.by_hand or (granted >= course.enough and rung.most > course.enough):
            return 0.0
        return max(0.0, self.foreseen - min(granted, rung.most) * (able.mu or able.mu_max))

    def _reason(self, rung: ModeOption, by_load: bool, short: float) -> str:
        proposal = self.proposal
        said = [f"wants {proposal.count}: {proposal.reason}"]
        if by_load:
            said = [f"{rung.mode} is predicted to cost {self.verdict.gain:.0%} less than {self.rung.mode}"]
        elif self.to is not None:
            said = [f"{rung.mode} is set manually"]
        said = [*slo_misses(self.situation), *said]
        said += [f"{self._limited(clip)} by {clip.rule}: {clip.why}" for clip in self.course.clips]
        said += self.notes
        if self.course.asleep and self.course.asleep not in said[-1]:
            said.append(self.course.asleep)
        if short:
            spillover = ", may spill over to upstreams" if self.situation.overflow else ""
            said.append(f"{short:.2f} req/s over capacity{spillover}")
        return "; ".join(said)

    def _limited(self, limit: Limit) -> str:
        if limit.now < limit.was:
            return f"capped at {limit.now}"
        return f"{'kept at' if limit.now == self.situation.count else 'raised to'} {limit.now}"


def slo_misses(situation: Situation) -> list[str]:
    """The SLO targets that the last minute missed, with what was measured."""
    demand, slo = situation.signals.demand, situation.slo
    if demand is None:
        return []
    measured = (("TTFT", demand.ttft, slo.ttft_p95_s), ("ITL", demand.itl, slo.itl_p95_s))
    return [
        f"SLO missed: {name} p95 {seen.p95 * 1e3:.0f} ms > {target_s * 1e3:.0f} ms"
        for name, seen, target_s in measured
        if seen is not None and target_s is not None and seen.p95 > target_s
    ]


def _still_switches(situation: Situation) -> bool:
    """Whether the last switch is still under way: mode.dwell_s counts from its end."""
    memory = situation.memory
    if memory.switched_at is None or situation.settled or situation.supply.failures:
        return False
    return memory.at is None or memory.switched_at >= memory.at


def _since(earlier: float | None, at: float) -> float:
    return at if earlier is None else earlier


def _remembered(situation: Situation) -> Memory:
    """The memory without what is outdated: nothing is known of a time without decisions.

    Instants that are still to come are of a clock that was set back while no controller ran: policies would
    see no observation as newer than those, and every term would last until then.
    """
    memory, at = situation.memory, situation.at
    if memory.at is None:
        return memory
    if memory.at > at:
        return Memory(switched_at=None if memory.switched_at is None else min(memory.switched_at, at))
    if at - memory.at > situation.tick_s + situation.guard.stale_s:
        return msgspec.structs.replace(
            memory, low_since={}, better_since={}, starved_since=None, waits_since=None
        )
    return memory


def _think(situation: Situation, mind: ModelPolicies) -> _Proposal:
    """What the policies propose, and what the model asks of the budget."""
    situation = msgspec.structs.replace(situation, memory=_remembered(situation))
    workload = workload_of(situation.signals.demand)
    rung = next(rung for rung in situation.rungs if rung.mode == situation.mode)
    capabilities = {
        rung.mode: capability(rung.timing, workload, situation.slo, error=rung.error, version=rung.version)
        for rung in situation.rungs
    }
    view = View(
        at=situation.at,
        tick_s=situation.tick_s,
        model=situation.model,
        mode=situation.mode,
        count=situation.count,
        least=rung.least,
        most=rung.most,
        supply=situation.supply,
        signals=situation.signals,
        capability=capabilities[rung.mode],
        lead_s=rung.lead_s,
        queue_s=situation.queue_s,
        slo=situation.slo,
    )
    memory = situation.memory
    proposal = mind.live.decide(view, memory.policy)
    return _Proposal(
        situation=situation,
        rung=rung,
        workload=workload,
        capabilities=capabilities,
        proposal=proposal,
        shadow=None if mind.shadow is None else mind.shadow.decide(view, memory.shadow),
        others={
            name: mind.others[name].decide(view, memory.others.get(name)) for name in sorted(mind.others)
        },
        course=asked(situation, rung, proposal.count),
    )


def _allotted(thoughts: Mapping[str, _Proposal], budget: Budget) -> dict[str, int]:
    """The counts that the budget grants; a switch that cannot get all it needs is postponed."""
    while True:
        grants = allocate([thought.want() for thought in thoughts.values()], budget)
        cut = [thought for thought in thoughts.values() if thought.is_cut(grants)]
        if not cut:
            return grants
        last = min(cut, key=lambda thought: (thought.situation.priority, thought.situation.model))
        last.stay(grants[last.situation.model])
