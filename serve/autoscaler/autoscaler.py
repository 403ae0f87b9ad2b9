"""The decision loop of all models: situations -> policies -> journal -> targets.

The memory of a decision is on disk before the decision is carried out, so a controller that was killed at any
moment continues with the same memory. Decisions are made in a thread, one round at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec.structs import replace

from policy.config.deployment import Deployment
from policy.errors import SwitchRefused, Unreachable
from policy.scaling.decide import ModelPolicies, decide_all
from policy.scaling.decision_schedule import DecisionSchedule
from policy.scaling.decision_types import Decision, DecisionMemory, Situation
from policy.scaling.start_times import StartTime
from policy.scaling.switch_cost import describe_gain
from policy.signals.aggregator import SignalAggregator
from policy.wire.controller_reports import GatewayReport
from serve.async_waiting import run_in_thread
from serve.autoscaler.decision_history import DecisionHistory
from serve.autoscaler.decision_inputs import SituationBuilder
from serve.autoscaler.decision_journal import DecisionJournal, DecisionRound, JournaledPolicies
from serve.autoscaler.decision_metrics import DecisionCounts
from serve.autoscaler.live_model_fitting import CalibrationStore
from serve.autoscaler.mode_switch_outcome import expected_gain, review
from serve.autoscaler.policies import PolicyInstances, restore_policies
from serve.state.desired_state import ModelTarget, ModelTargets, wanted_models
from serve.state.observed_state import ObservedState
from serve.state.reconcile_errors import ModelFailures
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

# A policy that takes longer is not waited for: replicas must be kept running meanwhile.
PATIENCE_S = 2.0
_decode_round = msgspec.json.Decoder(DecisionRound).decode


class AutoscalerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a restarted controller continues with: memories, the policies that made them, and start times."""

    memories: dict[str, DecisionMemory] = {}
    policies: dict[str, JournaledPolicies] = {}
    starts: tuple[StartTime, ...] = ()


@dataclass(eq=False)
class Autoscaler:
    """One for all models. ``set_target`` sets a target, ``wake`` starts the controller's next tick at once.
    ``failures`` records a failure of one model, for which no decision is made then. ``latest`` are the last
    decisions by model, ``decided_on`` their situations. A round is waited for ``patience_s``.

    ``now`` are the seconds of a clock that never goes back; ``epoch`` is the Unix time at its 0.
    """

    state: StateDir
    targets: ModelTargets
    observed: ObservedState
    aggregator: SignalAggregator
    now: Callable[[], float]
    epoch: float
    set_target: Callable[[str, ModelTarget], None]
    wake: Callable[[], None]
    event: Callable[[str], None]
    failures: ModelFailures
    patience_s: float = PATIENCE_S
    latest: dict[str, Decision] = field(default_factory=dict, init=False)
    decided_on: dict[str, Situation] = field(default_factory=dict, init=False)
    _policies: dict[str, PolicyInstances] = field(default_factory=dict, init=False)
    _changed: set[str] = field(default_factory=set, init=False)
    _urgent: set[str] = field(default_factory=set, init=False)
    _running: asyncio.Task[None] | None = field(default=None, init=False)
    _revision: int = field(default=0, init=False)
    _modes: dict[str, str] = field(default_factory=dict, init=False)
    _overdue: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.journal = DecisionJournal(self.state.decisions_path)
        self.history = DecisionHistory()
        self.counts = DecisionCounts()
        self._calibrations = CalibrationStore(self.state)
        self.situations = SituationBuilder(
            self.targets, self.observed, self._calibrations, self.aggregator, self.now
        )
        self._schedule = DecisionSchedule(self.now())
        self._kept = self._read()
        self.observed.starts.restore(self._kept.starts)

    @property
    def at(self) -> float:
        """Now, in Unix seconds, by the clock that never goes back."""
        return self.epoch + self.now()

    async def restore(self, deployment: Deployment) -> None:
        """Continue with the deployment of a predecessor."""
        self._policies = await run_in_thread(lambda: restore_policies(deployment, self.event), "policies")
        await run_in_thread(lambda: self.history.restore(self.journal, self.at), "history")

    def adopt(self, policies: dict[str, PolicyInstances]) -> None:
        """Decide by the policies of a new deployment from now on; decides at once."""
        self._policies = policies
        self._revision += 1
        self._urgent |= policies.keys()

    def decided_by(self, model: str) -> str:
        """The policy that decides for ``model``, or ``by hand`` under a manual override."""
        if self.targets.get(model).override(self.at) is not None:
            return "by hand"
        return self._policies[model].live_name(model) if model in self._policies else "nobody"

    def check_budget(self, target: ModelTarget, deployment: Deployment) -> None:
        """Raise :class:`policy.errors.SwitchRefused` where the other models leave too little budget.

        The running replicas would be scaled down for new ones that the budget then does not allow.
        """
        model, aim = target.spec.name, target.aim
        left = self.situations.beside(self._names(deployment) - {model}, deployment, self.at)
        if (fit := left.holds(self.situations.takes(target, deployment.budget))) < aim.count:
            raise SwitchRefused(
                f"{model}: {aim.mode} x {aim.count} exceeds the budget left by other models, which fits {fit}"
            )

    def has_room(self, target: ModelTarget, deployment: Deployment) -> bool:
        """Whether the budget has room for one more replica of the desired mode."""
        left = self.situations.beside(self._names(deployment), deployment, self.at)
        return left.holds(self.situations.takes(target, deployment.budget)) >= 1

    def decide_soon(self, model: str, *, urgent: bool = False) -> None:
        """Decide for ``model`` in the next tick; ``urgent`` also before signals were received."""
        (self._urgent if urgent else self._changed).add(model)
        self.wake()

    def take_report(self, report: GatewayReport) -> None:
        """Decide at once for a model at zero replicas for which a request is queued."""
        for name, counts in report.models.items():
            if counts.queued and name in self.targets.names() and not self.targets.get(name).aim.count:
                self.decide_soon(name, urgent=True)

    async def tick(self, deployment: Deployment) -> None:
        """Make the decisions that are due and carry them out."""
        self._forget()
        self._end_overrides()
        self._review_switches(deployment)
        ticks_s = {name: self.targets.get(name).spec.control.tick_s for name in self._names(deployment)}
        names = self._schedule.due(
            ticks_s, self.now(), deployment.budget, changed=self._changed, urgent=self._urgent
        )
        if not names or not self._idle():
            return
        self._changed -= names
        self._urgent -= names
        at, revision = self.at, self._revision
        situations: dict[str, Situation] = {}
        for name in names:
            with self.failures.recorded(name, "observation"):
                situations[name] = self.situations.situation(name, deployment, self._memory(name, at), at)
            # Each takes a millisecond: a hundred in a row would delay heartbeats.
            await asyncio.sleep(0)
        instances = {name: self._policies[name].instances for name in situations}
        policies = {name: self._policies[name].chosen for name in situations}
        asked = DecisionRound(at=at, policies=policies, situations=situations, budget=deployment.budget)
        self._running = asyncio.create_task(self._round(asked, instances, deployment, revision))
        await asyncio.wait({self._running}, timeout=self.patience_s)

    def _forget(self) -> None:
        """Forget models that were removed."""
        known = set(self.targets.names())
        for gone in self.latest.keys() - known:
            self.latest.pop(gone)
            self.decided_on.pop(gone)
            self.history.forget(gone)
            self.counts.forget(gone)
            self._modes.pop(gone, None)
            self.journal.forget(gone)

    def _idle(self) -> bool:
        """Whether no round is running; one that does not end is reported once."""
        if self._running is None or self._running.done():
            self._overdue = False
            return True
        if not self._overdue:
            self._overdue = True
            self.event(
                f"a policy has not answered for {self.patience_s:g} s; replica counts stay until it does"
            )
        return False

    async def _round(
        self,
        asked: DecisionRound,
        instances: Mapping[str, ModelPolicies],
        deployment: Deployment,
        revision: int,
    ) -> None:
        try:
            made = await run_in_thread(lambda: self._decide(asked, instances), "decide")
        except Exception as error:
            # A decision that fails must not take the control loop with it.
            log.exception("no decision")
            self.event(f"no decision was made: {type(error).__name__}: {error}")
            return
        decisions = made.decisions
        self.latest |= decisions
        self.decided_on |= made.situations
        for name, decision in decisions.items():
            self.history.add(made.situations[name], decision)
        self.counts.take(decisions, made.situations)
        self.journal.put(made)
        if revision != self._revision:
            # A new deployment, whose modes and bounds may differ, is decided on at once.
            return
        for name, decision in decisions.items():
            if name in self.targets.names():
                with self.failures.recorded(name, "decision"):
                    self._carry_out(made.situations[name], decision, deployment)

    def _decide(self, asked: DecisionRound, instances: Mapping[str, ModelPolicies]) -> DecisionRound:
        """Decide on exactly what the journal records, and save the memory; runs in a thread."""
        self._calibrations.learn(self.now())
        made = _decode_round(msgspec.json.encode(asked))
        decided = self._decided(made, instances)
        memories = self._kept.memories | {name: memory for name, (_, memory) in decided.items()}
        policies = self._kept.policies | made.policies
        # Models that were removed are forgotten.
        known = self.targets.stored
        kept = AutoscalerState(
            memories={name: memory for name, memory in memories.items() if name in known},
            policies={name: chosen for name, chosen in policies.items() if name in known},
            starts=self.observed.starts.saved(),
        )
        try:
            self.state.save(self.state.memory_path, kept)
        except (OSError, Unreachable) as error:
            log.warning("%s: %s", self.state.memory_path, error)
        self._kept = kept
        decisions = {name: decision for name, (decision, _) in decided.items()}
        situations = {name: made.situations[name] for name in decisions}
        return replace(made, situations=situations, decisions=decisions)

    def _decided(
        self, made: DecisionRound, instances: Mapping[str, ModelPolicies]
    ) -> dict[str, tuple[Decision, DecisionMemory]]:
        """The decisions, after an error without the models that cause it; their counts stay."""
        try:
            return decide_all(made.situations, made.budget, instances)
        except Exception:
            able: dict[str, Situation] = {}
            for name, situation in made.situations.items():
                with self.failures.recorded(name, "decision"):
                    decide_all({name: situation}, made.budget, instances)
                    able[name] = situation
            if len(able) == len(made.situations):
                raise
            return decide_all(able, made.budget, instances)

    def _carry_out(self, situation: Situation, decision: Decision, deployment: Deployment) -> None:
        name, target = decision.model, self.targets.get(decision.model)
        if decision.dry_run or not decision.changes:
            return
        known = (situation.mode, situation.count, situation.override)
        if (target.aim.mode, target.aim.count, target.override(situation.at)) != known:
            # The target was changed meanwhile.
            self.decide_soon(name)
            return
        if decision.mode != target.aim.mode:
            self._switch(target, situation, decision, deployment)
            return
        self.event(f"{name}: {self.decided_by(name)}: {decision.reason}")
        aim = replace(target.aim, count=decision.count)
        # The note of a rollback stays.
        self.set_target(name, replace(target.toward(aim, self.at, gap=target.gap), note=target.note))

    def _switch(
        self, target: ModelTarget, situation: Situation, decision: Decision, deployment: Deployment
    ) -> None:
        proposed = target.toward(target.in_mode(decision.mode, decision.count), self.at)
        try:
            planned = self.observed.planned(proposed, deployment)
        except SwitchRefused as refused:
            self.event(str(refused))
            # There was no switch, so mode.dwell_s does not apply.
            before = situation.memory.switched_at
            memory = replace(self._kept.memories[decision.model], switched_at=before)
            memories = self._kept.memories | {decision.model: memory}
            self._kept = replace(self._kept, memories=memories)
            return
        self.event(f"{decision.model}: {self.decided_by(decision.model)}: {decision.reason}")
        promise = expected_gain(decision, situation)
        self._modes[decision.model] = decision.mode
        self.set_target(decision.model, replace(planned, promise=promise))

    def _review_switches(self, deployment: Deployment) -> None:
        """Report the measured saving of each switch made by load, beside the predicted one."""
        for name in self._names(deployment):
            with self.failures.recorded(name, "review of a switch"):
                self._review_switch(name, deployment)

    def _review_switch(self, name: str, deployment: Deployment) -> None:
        target, at = self.targets.get(name), self.at
        situation = partial(self.situations.situation, name, deployment, DecisionMemory(), at)
        promise, found = review(target, at, situation)
        if found is not None:
            self.journal.put(found)
            self.event(
                f"{name}: {found.was} -> {found.mode}: predicted gain {found.promised:.0%},"
                f" measured: {describe_gain(found.measured)};"
                f" {found.met_before:.1%} of requests met the SLO before, {found.met:.1%} since"
            )
        if promise != target.promise:
            self.targets.put(name, replace(target, promise=promise))

    def _end_overrides(self) -> None:
        """Clear manual overrides whose duration is over."""
        at = self.at
        for name in self.targets.names():
            target = self.targets.get(name)
            over = {
                field: None
                for field, chosen in (("set_mode", target.set_mode), ("set_count", target.set_count))
                if chosen is not None and chosen.ended(at)
            }
            if over:
                self.event(f"{name}: the manual override ended")
                self.targets.put(name, replace(target, **over))
                self._changed.add(name)

    def _names(self, deployment: Deployment) -> set[str]:
        """The models to decide on: not those that are removed, or whose mode is."""
        return {
            spec.name
            for spec in wanted_models(deployment)
            if spec.name in self._policies
            and spec.name in self.targets.names()
            and (target := self.targets.get(spec.name)).aim.mode in target.spec.modes
        }

    def _memory(self, model: str, at: float) -> DecisionMemory:
        """The memory of the last decision, without that of a policy that was replaced."""
        memory, mode = self._kept.memories.get(model, DecisionMemory()), self.targets.get(model).aim.mode
        if self._modes.setdefault(model, mode) != mode:
            # A manual, configured or rolled back change is a switch too: mode.dwell_s applies.
            self._modes[model] = mode
            memory = replace(memory, low_since={}, better_since={}, switched_at=at)
        before, now = self._kept.policies.get(model), self._policies[model].chosen
        if before is not None and before.live != now.live:
            memory = replace(memory, policy=None)
        if before is not None and before.shadow != now.shadow:
            memory = replace(memory, shadow=None)
        return memory

    def _read(self) -> AutoscalerState:
        try:
            return self.state.load(self.state.memory_path, AutoscalerState) or AutoscalerState()
        except (msgspec.MsgspecError, OSError) as error:
            # Of another version, incomplete, or on a bad disk: start with empty memories.
            log.warning("%s: %s", self.state.memory_path, error)
            return AutoscalerState()
