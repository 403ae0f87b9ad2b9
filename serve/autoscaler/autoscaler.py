"""The decision loop of all models: situations -> policies -> journal -> targets.

The memory of a decision is on disk before the decision is carried out, so a controller that was killed at any
moment continues with the same memory. Decisions are made in a thread, one round at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from policy.config.deployment import Deployment
from policy.errors import SwitchRefused
from policy.scaling.decide import ModelPolicies, decide_all
from policy.scaling.decision_schedule import DecisionSchedule
from policy.scaling.decision_types import Decision, Memory, Situation
from policy.scaling.start_times import StartTime
from policy.signals.aggregator import SignalAggregator
from policy.wire.heartbeat import Heartbeat
from policy.wire.reports import GatewayReport
from serve.autoscaler.calibrated_models import CalibrationStore
from serve.autoscaler.decision_inputs import SituationBuilder
from serve.autoscaler.decision_journal import DecisionRound, Journal, Policies
from serve.autoscaler.policies import PolicySet
from serve.autoscaler.switch_review import due, expected_gain, outcome
from serve.controller_messages import LoggedDecision
from serve.state.desired_state import DesiredMode, Target, Targets, wanted_models
from serve.state.observed_state import ObservedState
from serve.threads import run_in_thread
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

# A policy that takes longer is not waited for: replicas must be kept running meanwhile.
PATIENCE_S = 2.0


class KeptState(msgspec.Struct, frozen=True, kw_only=True):
    """What a restarted controller continues with: memories, the policies that made them, and start times."""

    memories: dict[str, Memory] = {}
    policies: dict[str, Policies] = {}
    starts: tuple[StartTime, ...] = ()


class Autoscaler:
    """One for all models. ``set_target`` sets a target, ``wake`` starts the controller's next tick at once.

    ``now`` are the seconds of a clock that never goes back; ``epoch`` is the Unix time at its 0.
    """

    def __init__(
        self,
        state: StateDir,
        targets: Targets,
        observed: ObservedState,
        aggregator: SignalAggregator,
        *,
        now: Callable[[], float],
        epoch: float,
        set_target: Callable[[str, Target], None],
        wake: Callable[[], None],
        event: Callable[[str], None],
    ) -> None:
        self._state = state
        self._targets = targets
        self._observed = observed
        self._now = now
        self._epoch = epoch
        self._set_target = set_target
        self._wake = wake
        self._event = event
        self._policies = PolicySet(event)
        self._calibrations = CalibrationStore(state)
        self._situations = SituationBuilder(targets, observed, self._calibrations, aggregator, now)
        self.journal = Journal(state.decisions_path)
        self._kept = self._read()
        observed.starts.restore(self._kept.starts)
        self._schedule = DecisionSchedule(now())
        self._changed: set[str] = set()
        self._urgent: set[str] = set()
        self._running: asyncio.Task[None] | None = None
        self._revision = 0
        self._modes: dict[str, str] = {}
        self._overdue = False
        self.latest: dict[str, Decision] = {}

    @property
    def at(self) -> float:
        """Now, in Unix seconds, by the clock that never goes back."""
        return self._epoch + self._now()

    def prepare(self, deployment: Deployment) -> None:
        """Make the policies of a revision, or raise :class:`policy.errors.ConfigError`.

        Imports what users wrote: not for an event loop.
        """
        self._policies.prepare(deployment)

    async def restore(self, deployment: Deployment) -> None:
        """Continue with the deployment of a predecessor."""
        await run_in_thread(lambda: self._policies.restore(deployment), "policies")

    def ready(self, deployment: Deployment) -> None:
        """Make the policies that :meth:`adopt` needs and that are missing; raises like :meth:`prepare`."""
        self._policies.ready(deployment)

    def adopt(self, deployment: Deployment) -> None:
        """Decide by ``deployment``, which is :meth:`ready`, from now on; decides at once."""
        self._policies.adopt()
        self._revision += 1
        self._urgent.update(spec.name for spec in wanted_models(deployment))

    def decided_by(self, model: str) -> str:
        """The policy that decides for ``model``, or ``by hand`` under a manual override."""
        by_hand = self._targets.get(model).override(self.at)
        return self._policies.name(model) if by_hand is None else "by hand"

    def check_budget(self, target: Target, deployment: Deployment) -> None:
        """Raise :class:`policy.errors.SwitchRefused` where the other models leave too little budget.

        The running replicas would be scaled down for new ones that the budget then does not allow.
        """
        model, aim = target.spec.name, target.aim
        left = self._situations.beside(self._names(deployment) - {model}, deployment, self.at)
        if (fit := left.holds(self._situations.takes(target, deployment.budget))) < aim.count:
            raise SwitchRefused(
                f"{model}: {aim.mode} x {aim.count} exceeds the budget left by other models, which fits {fit}"
            )

    def has_room(self, target: Target, deployment: Deployment) -> bool:
        """Whether the budget has room for one more replica of the desired mode."""
        left = self._situations.beside(self._names(deployment), deployment, self.at)
        return left.holds(self._situations.takes(target, deployment.budget)) >= 1

    def decide_soon(self, model: str, *, urgent: bool = False) -> None:
        """Decide for ``model`` in the next tick; ``urgent`` also before signals were received."""
        (self._urgent if urgent else self._changed).add(model)
        self._wake()

    def take_report(self, report: GatewayReport) -> None:
        """Decide at once for a model at zero replicas for which a request is queued."""
        for name, counts in report.models.items():
            if counts.queued and name in self._targets.names() and not self._targets.get(name).aim.count:
                self.decide_soon(name, urgent=True)

    def beat(self, beat: Heartbeat) -> None:
        """Take the speed that a replica reports."""
        self._situations.note(beat)

    async def decisions(self, last: int, at: float | None, model: str | None) -> list[LoggedDecision]:
        """The ``last`` decisions, newest first."""
        return await run_in_thread(lambda: self.journal.read(last, at, model), "journal-read")

    async def tick(self, deployment: Deployment) -> None:
        """Make the decisions that are due and carry them out."""
        self._forget()
        self._end_overrides()
        self._review_switches(deployment)
        names = self._due(deployment)
        if not names or not self._idle():
            return
        self._changed -= names
        self._urgent -= names
        at, revision = self.at, self._revision
        memories = {name: self._memory(name, at) for name in names}
        model_policies = {name: self._policies.of(name) for name in names}
        policies = {name: self._policies.chosen(name) for name in names}
        situations = {}
        for name in names:
            situations[name] = self._situations.situation(name, deployment, memories[name], at)
            # Each takes a millisecond: a hundred in a row would delay heartbeats.
            await asyncio.sleep(0)
        asked = DecisionRound(at=at, policies=policies, situations=situations, budget=deployment.budget)
        self._running = asyncio.create_task(self._round(asked, model_policies, deployment, revision))
        await asyncio.wait({self._running}, timeout=PATIENCE_S)

    def _forget(self) -> None:
        """Forget models that were removed."""
        known = set(self._targets.names())
        for gone in self.latest.keys() - known:
            self.latest.pop(gone)
            self._modes.pop(gone, None)
            self.journal.forget(gone)

    def _idle(self) -> bool:
        """Whether no round is running; one that does not end is reported once."""
        if self._running is None or self._running.done():
            self._overdue = False
            return True
        if not self._overdue:
            self._overdue = True
            self._event(f"a policy has not answered for {PATIENCE_S:g} s; replica counts stay until it does")
        return False

    async def _round(
        self,
        asked: DecisionRound,
        model_policies: Mapping[str, ModelPolicies],
        deployment: Deployment,
        revision: int,
    ) -> None:
        try:
            made = await run_in_thread(lambda: self._decide(asked, model_policies), "decide")
        except Exception as error:
            # A decision that fails must not take the control loop with it.
            log.exception("no decision")
            self._event(f"no decision was made: {type(error).__name__}: {error}")
            return
        decisions = made.decisions
        self.latest |= decisions
        self.journal.put(made)
        if revision != self._revision:
            # A new deployment, whose modes and bounds may differ, is decided on at once.
            return
        for name, decision in decisions.items():
            if name in self._targets.names():
                self._carry_out(made.situations[name], decision, deployment)

    def _decide(self, asked: DecisionRound, model_policies: Mapping[str, ModelPolicies]) -> DecisionRound:
        """Decide on exactly what the journal records, and save the memory; runs in a thread."""
        self._calibrations.learn(self._now())
        made = msgspec.json.decode(msgspec.json.encode(asked), type=DecisionRound)
        decided = decide_all(made.situations, made.budget, model_policies)
        memories = self._kept.memories | {name: memory for name, (_, memory) in decided.items()}
        policies = self._kept.policies | made.policies
        # Models that were removed are forgotten.
        known = self._targets.names()
        kept = KeptState(
            memories={name: memory for name, memory in memories.items() if name in known},
            policies={name: chosen for name, chosen in policies.items() if name in known},
            starts=self._observed.starts.saved(),
        )
        try:
            self._state.save(self._state.memory_path, kept)
        except OSError as error:
            log.warning("%s: %s", self._state.memory_path, error)
        self._kept = kept
        decisions = {name: decision for name, (decision, _) in decided.items()}
        return msgspec.structs.replace(made, decisions=decisions)

    def _carry_out(self, situation: Situation, decision: Decision, deployment: Deployment) -> None:
        name, target = decision.model, self._targets.get(decision.model)
        if decision.dry_run or not decision.changes:
            return
        known = (situation.mode, situation.count, situation.override)
        if (target.aim.mode, target.aim.count, target.override(situation.at)) != known:
            # The target was changed meanwhile.
            self.decide_soon(name)
            return
        if decision.mode == target.aim.mode:
            self._count(target, decision)
        else:
            self._switch(target, situation, decision, deployment)

    def _count(self, target: Target, decision: Decision) -> None:
        aim = msgspec.structs.replace(target.aim, count=decision.count)
        self._event(f"{decision.model}: {self.decided_by(decision.model)}: {decision.reason}")
        toward = target.toward(aim, self.at, gap=target.gap)
        # The note of a rollback stays.
        self._set_target(decision.model, msgspec.structs.replace(toward, note=target.note))

    def _switch(
        self, target: Target, situation: Situation, decision: Decision, deployment: Deployment
    ) -> None:
        shape = target.spec.modes[decision.mode].shape
        generation = target.aim.generation
        aim = DesiredMode(mode=decision.mode, shape=shape, count=decision.count, generation=generation)
        proposed = target.toward(aim, self.at)
        try:
            gap = self._observed.check_gap(proposed, deployment)
        except SwitchRefused as refused:
            self._event(str(refused))
            # There was no switch, so mode.dwell_s does not apply.
            before = situation.memory.switched_at
            memory = msgspec.structs.replace(self._kept.memories[decision.model], switched_at=before)
            memories = self._kept.memories | {decision.model: memory}
            self._kept = msgspec.structs.replace(self._kept, memories=memories)
            return
        gain = f" (predicted saving {decision.gain:.0%})" if decision.gain is not None else ""
        self._event(f"{decision.model}: {self.decided_by(decision.model)}: {decision.reason}{gain}")
        promise = expected_gain(decision, situation)
        self._modes[decision.model] = decision.mode
        self._set_target(decision.model, msgspec.structs.replace(proposed, gap=gap, promise=promise))

    def _review_switches(self, deployment: Deployment) -> None:
        """Report the measured saving of each switch made by load, beside the predicted one."""
        for name in self._names(deployment):
            target = self._targets.get(name)
            if target.promise is None:
                continue
            if target.promise.mode != target.aim.mode:
                self._targets.put(name, msgspec.structs.replace(target, promise=None))
                continue
            promise, judged = due(target.promise, target.settled, self.at)
            if judged:
                situation = self._situations.situation(name, deployment, Memory(), self.at)
                if (found := outcome(promise, situation)) is not None:
                    self.journal.put(found)
                    self._event(
                        f"{name}: {found.was} -> {found.mode}: predicted saving {found.promised:.0%},"
                        f" measured {found.measured:.0%};"
                        f" {found.met_before:.1%} of requests met the SLO before, {found.met:.1%} since"
                    )
            if judged or promise != target.promise:
                left = None if judged else promise
                self._targets.put(name, msgspec.structs.replace(target, promise=left))

    def _end_overrides(self) -> None:
        """Clear manual overrides whose duration is over."""
        at = self.at
        for name in self._targets.names():
            target = self._targets.get(name)
            over = {
                field: None
                for field, chosen in (("set_mode", target.set_mode), ("set_count", target.set_count))
                if chosen is not None and chosen.until is not None and chosen.until <= at
            }
            if over:
                self._event(f"{name}: the manual override ended")
                self._targets.put(name, msgspec.structs.replace(target, **over))
                self._changed.add(name)

    def _due(self, deployment: Deployment) -> set[str]:
        """The models to decide on now."""
        names = self._names(deployment)
        ticks_s = {name: self._targets.get(name).spec.control.tick_s for name in names}
        return self._schedule.due(
            ticks_s, self._now(), deployment.budget, changed=self._changed, urgent=self._urgent
        )

    def _names(self, deployment: Deployment) -> set[str]:
        """The models to decide on: not those that are removed, or whose mode is."""
        return {
            spec.name
            for spec in wanted_models(deployment)
            if spec.name in self._policies
            and spec.name in self._targets.names()
            and _in_a_mode(self._targets.get(spec.name))
        }

    def _memory(self, model: str, at: float) -> Memory:
        """The memory of the last decision, without that of a policy that was replaced."""
        memory, mode = self._kept.memories.get(model, Memory()), self._targets.get(model).aim.mode
        if self._modes.setdefault(model, mode) != mode:
            # A manual, configured or rolled back change is a switch too: mode.dwell_s applies.
            self._modes[model] = mode
            memory = msgspec.structs.replace(memory, low_since={}, better_since={}, switched_at=at)
        before, now = self._kept.policies.get(model), self._policies.chosen(model)
        if before is not None and before.live != now.live:
            memory = msgspec.structs.replace(memory, policy=None)
        if before is not None and before.shadow != now.shadow:
            memory = msgspec.structs.replace(memory, shadow=None)
        return memory

    def _read(self) -> KeptState:
        try:
            return self._state.load(self._state.memory_path, KeptState) or KeptState()
        except (msgspec.MsgspecError, OSError) as error:
            # Of another version, incomplete, or on a bad disk: start with empty memories.
            log.warning("%s: %s", self._state.memory_path, error)
            return KeptState()


def _in_a_mode(target: Target) -> bool:
    return target.aim.mode in target.spec.modes
