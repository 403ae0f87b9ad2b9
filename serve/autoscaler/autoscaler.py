"""Decides how many replicas of which shape each model has: situations -> policies -> journal -> targets.

What a decision remembers is on disk before the decision is carried out, so a controller that was killed at
any moment goes on with the same memory. Decisions are made beside the event loop, one round at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from policy.config.deployment import Deployment
from policy.errors import SwitchRefused
from policy.scaling.decide import ModelPolicies, decide_all
from policy.scaling.schedule import DecisionSchedule
from policy.scaling.situation import Decision, Memory, Situation
from policy.scaling.start_times import StartTime
from policy.signals.aggregator import SignalAggregator
from policy.wire.heartbeat import Heartbeat
from policy.wire.reports import GatewayReport
from serve.autoscaler.calibration import CalibrationStore
from serve.autoscaler.journal import DecisionRound, Journal, Policies
from serve.autoscaler.policies import PolicySet
from serve.autoscaler.situations import SituationBuilder
from serve.autoscaler.switch_review import due, expected_gain, outcome
from serve.controller_api import LoggedDecision
from serve.state.observed import ObservedState
from serve.state.targets import DesiredMode, Target, Targets, wanted_models
from serve.threads import run_in_thread
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

# A policy that takes longer is not waited for: what runs must be kept up meanwhile.
PATIENCE_S = 2.0


class KeptState(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives a controller: memories, by whom each was made, and how long starts took."""

    memories: dict[str, Memory] = {}
    policies: dict[str, Policies] = {}
    starts: tuple[StartTime, ...] = ()


class Autoscaler:
    """One for all models. ``steer`` sets a target, ``wake`` has the controller look at once.

    ``now`` are the seconds of a clock that never goes back; ``epoch`` is the Unix time at its 0.
    """

    def __init__(
        self,
        state: StateDir,
        targets: Targets,
        observation: ObservedState,
        gathering: SignalAggregator,
        *,
        now: Callable[[], float],
        epoch: float,
        steer: Callable[[str, Target], None],
        wake: Callable[[], None],
        event: Callable[[str], None],
    ) -> None:
        self._state = state
        self._targets = targets
        self._observation = observation
        self._now = now
        self._epoch = epoch
        self._steer = steer
        self._wake = wake
        self._event = event
        self._minds = PolicySet(event)
        self._calibrations = CalibrationStore(state)
        self._surveying = SituationBuilder(targets, observation, self._calibrations, gathering, now)
        self.journal = Journal(state.decisions_path)
        self._kept = self._read()
        observation.starts.restore(self._kept.starts)
        self._schedule = DecisionSchedule(now())
        self._stirred: set[str] = set()
        self._urgent: set[str] = set()
        self._running: asyncio.Task[None] | None = None
        self._documents = 0
        self._modes: dict[str, str] = {}
        self._overdue = False
        self.latest: dict[str, Decision] = {}

    @property
    def at(self) -> float:
        """This instant in Unix seconds, by the clock that never goes back."""
        return self._epoch + self._now()

    def prepare(self, deployment: Deployment) -> None:
        """Make the policies of a document, or raise :class:`policy.errors.ConfigError`.

        Imports what users wrote: not for an event loop.
        """
        self._minds.prepare(deployment)

    async def take_up(self, deployment: Deployment) -> None:
        """Go on with the document of a predecessor."""
        await run_in_thread(lambda: self._minds.take_up(deployment), "policies")

    def ready(self, deployment: Deployment) -> None:
        """Have the policies that :meth:`adopt` takes, made before or now; raises as :meth:`prepare` does."""
        self._minds.ready(deployment)

    def adopt(self, deployment: Deployment) -> None:
        """Decide by ``deployment``, which is :meth:`ready`, from now on, and at once."""
        self._minds.adopt()
        self._documents += 1
        self._urgent.update(spec.name for spec in wanted_models(deployment))

    def who(self, model: str) -> str:
        """Who decides for ``model``: a policy, or somebody by hand."""
        by_hand = self._targets.get(model).override(self.at)
        return self._minds.name(model) if by_hand is None else "by hand"

    def check_afford(self, target: Target, deployment: Deployment) -> None:
        """Raise :class:`policy.errors.SwitchRefused` where the others leave less than the aim takes.

        Its replicas would be counted down to none, and those that run would make way for them.
        """
        model, aim = target.spec.name, target.aim
        left = self._surveying.beside(self._names(deployment) - {model}, deployment, self.at)
        if (fit := left.holds(self._surveying.takes(target, deployment.budget))) < aim.count:
            raise SwitchRefused(
                f"{model}: {aim.mode} x {aim.count} takes more than the budget leaves: {fit} would fit"
            )

    def has_room(self, target: Target, deployment: Deployment) -> bool:
        """Whether one more replica of the aim fits beside all that is held."""
        left = self._surveying.beside(self._names(deployment), deployment, self.at)
        return left.holds(self._surveying.takes(target, deployment.budget)) >= 1

    def stir(self, model: str, *, urgent: bool = False) -> None:
        """Something happened to ``model``: decide at the next look, or (``urgent``) whatever is known."""
        (self._urgent if urgent else self._stirred).add(model)
        self._wake()

    def heard(self, report: GatewayReport) -> None:
        """A request that waits for a model at zero does not wait for the next tick."""
        for name, told in report.models.items():
            if told.queued and name in self._targets.names() and not self._targets.get(name).aim.count:
                self.stir(name, urgent=True)

    def beat(self, beat: Heartbeat) -> None:
        """Learn from a replica how fast it is."""
        self._surveying.note(beat)

    async def decisions(self, last: int, at: float | None, model: str | None) -> list[LoggedDecision]:
        """The ``last`` decisions, newest first."""
        return await run_in_thread(lambda: self.journal.read(last, at, model), "journal-read")

    async def tick(self, deployment: Deployment) -> None:
        """Make the decisions that are due and carry them out."""
        self._forget()
        self._end_overrides()
        self._keep_promises(deployment)
        names = self._due(deployment)
        if not names or not self._idle():
            return
        self._stirred -= names
        self._urgent -= names
        at, document = self.at, self._documents
        memories = {name: self._memory(name, at) for name in names}
        minds = {name: self._minds.mind(name) for name in names}
        policies = {name: self._minds.policies(name) for name in names}
        situations = {}
        for name in names:
            situations[name] = self._surveying.situation(name, deployment, memories[name], at)
            # Each takes a millisecond, of which heartbeats would feel a hundred.
            await asyncio.sleep(0)
        asked = DecisionRound(at=at, policies=policies, situations=situations, budget=deployment.budget)
        self._running = asyncio.create_task(self._round(asked, minds, deployment, document))
        await asyncio.wait({self._running}, timeout=PATIENCE_S)

    def _forget(self) -> None:
        """Let go of models that are gone."""
        known = set(self._targets.names())
        for gone in self.latest.keys() - known:
            self.latest.pop(gone)
            self._modes.pop(gone, None)
            self.journal.forget(gone)

    def _idle(self) -> bool:
        """Whether no round is going on; one that does not end is said once."""
        if self._running is None or self._running.done():
            self._overdue = False
            return True
        if not self._overdue:
            self._overdue = True
            self._event(f"a policy has not answered for {PATIENCE_S:g} s; counts stay until it does")
        return False

    async def _round(
        self, asked: DecisionRound, minds: Mapping[str, ModelPolicies], deployment: Deployment, document: int
    ) -> None:
        try:
            made = await run_in_thread(lambda: self._decide(asked, minds), "decide")
        except Exception as error:
            # A decision that fails must not take the control loop with it.
            log.exception("no decision")
            self._event(f"no decision was made: {type(error).__name__}: {error}")
            return
        decisions = made.decisions
        self.latest |= decisions
        self.journal.put(made)
        if document != self._documents:
            # By another one, whose modes and bounds may be others, it is decided at once.
            return
        for name, decision in decisions.items():
            if name in self._targets.names():
                self._carry_out(made.situations[name], decision, deployment)

    def _decide(self, asked: DecisionRound, minds: Mapping[str, ModelPolicies]) -> DecisionRound:
        """Decide on what the log will have, word for word, and remember it on disk; beside the event loop."""
        self._calibrations.learn(self._now())
        made = msgspec.json.decode(msgspec.json.encode(asked), type=DecisionRound)
        decided = decide_all(made.situations, made.budget, minds)
        memories = self._kept.memories | {name: memory for name, (_, memory) in decided.items()}
        policies = self._kept.policies | made.policies
        # What is remembered of models that are gone is not.
        known = self._targets.names()
        kept = KeptState(
            memories={name: memory for name, memory in memories.items() if name in known},
            policies={name: chosen for name, chosen in policies.items() if name in known},
            starts=self._observation.starts.saved(),
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
            # Somebody set something else meanwhile.
            self.stir(name)
            return
        if decision.mode == target.aim.mode:
            self._count(target, decision)
        else:
            self._switch(target, situation, decision, deployment)

    def _count(self, target: Target, decision: Decision) -> None:
        aim = msgspec.structs.replace(target.aim, count=decision.count)
        self._event(f"{decision.model}: {self.who(decision.model)}: {decision.reason}")
        toward = target.toward(aim, self.at, gap=target.gap)
        # What was rolled back is so with another count as well.
        self._steer(decision.model, msgspec.structs.replace(toward, note=target.note))

    def _switch(
        self, target: Target, situation: Situation, decision: Decision, deployment: Deployment
    ) -> None:
        shape = target.spec.modes[decision.mode].shape
        generation = target.aim.generation
        aim = DesiredMode(mode=decision.mode, shape=shape, count=decision.count, generation=generation)
        proposed = target.toward(aim, self.at)
        try:
            gap = self._observation.check_gap(proposed, deployment)
        except SwitchRefused as refused:
            self._event(str(refused))
            # It was not switched, so nothing dwells.
            before = situation.memory.switched_at
            memory = msgspec.structs.replace(self._kept.memories[decision.model], switched_at=before)
            memories = self._kept.memories | {decision.model: memory}
            self._kept = msgspec.structs.replace(self._kept, memories=memories)
            return
        gain = f" (gain promised {decision.gain:.0%})" if decision.gain is not None else ""
        self._event(f"{decision.model}: {self.who(decision.model)}: {decision.reason}{gain}")
        promise = expected_gain(decision, situation)
        self._modes[decision.model] = decision.mode
        self._steer(decision.model, msgspec.structs.replace(proposed, gap=gap, promise=promise))

    def _keep_promises(self, deployment: Deployment) -> None:
        """Say of each switch that load made what it promised and what came of it."""
        for name in self._names(deployment):
            target = self._targets.get(name)
            if target.promise is None:
                continue
            if target.promise.mode != target.aim.mode:
                self._targets.put(name, msgspec.structs.replace(target, promise=None))
                continue
            promise, judged = due(target.promise, target.settled, self.at)
            if judged:
                situation = self._surveying.situation(name, deployment, Memory(), self.at)
                if (found := outcome(promise, situation)) is not None:
                    self.journal.put(found)
                    self._event(
                        f"{name}: {found.was} -> {found.mode}: gain promised {found.promised:.0%}, measured"
                        f" {found.measured:.0%}; {found.met_before:.1%} within the objective before,"
                        f" {found.met:.1%} since"
                    )
            if judged or promise != target.promise:
                left = None if judged else promise
                self._targets.put(name, msgspec.structs.replace(target, promise=left))

    def _end_overrides(self) -> None:
        """Forget what was set by hand for a time that is over."""
        at = self.at
        for name in self._targets.names():
            target = self._targets.get(name)
            over = {
                field: None
                for field, chosen in (("set_mode", target.set_mode), ("set_count", target.set_count))
                if chosen is not None and chosen.until is not None and chosen.until <= at
            }
            if over:
                self._event(f"{name}: what was set by hand is over")
                self._targets.put(name, msgspec.structs.replace(target, **over))
                self._stirred.add(name)

    def _due(self, deployment: Deployment) -> set[str]:
        """The models to decide on now."""
        names = self._names(deployment)
        ticks_s = {name: self._targets.get(name).spec.control.tick_s for name in names}
        return self._schedule.due(
            ticks_s, self._now(), deployment.budget, changed=self._stirred, urgent=self._urgent
        )

    def _names(self, deployment: Deployment) -> set[str]:
        """The models that are decided on: one that leaves, or leaves its mode, is not."""
        return {
            spec.name
            for spec in wanted_models(deployment)
            if spec.name in self._minds
            and spec.name in self._targets.names()
            and _in_a_mode(self._targets.get(spec.name))
        }

    def _memory(self, model: str, at: float) -> Memory:
        """What the last decision left, less what a policy remembers that decides no more."""
        memory, mode = self._kept.memories.get(model, Memory()), self._targets.get(model).aim.mode
        if self._modes.setdefault(model, mode) != mode:
            # By hand, by a document or rolled back: that is a switch too, and dwells.
            self._modes[model] = mode
            memory = msgspec.structs.replace(memory, low_since={}, better_since={}, switched_at=at)
        before, now = self._kept.policies.get(model), self._minds.policies(model)
        if before is not None and before.live != now.live:
            memory = msgspec.structs.replace(memory, policy=None)
        if before is not None and before.shadow != now.shadow:
            memory = msgspec.structs.replace(memory, shadow=None)
        return memory

    def _read(self) -> KeptState:
        try:
            return self._state.load(self._state.memory_path, KeptState) or KeptState()
        except (msgspec.MsgspecError, OSError) as error:
            # Of another version, half of it, or on a bad disk: memories are learned anew.
            log.warning("%s: %s", self._state.memory_path, error)
            return KeptState()


def _in_a_mode(target: Target) -> bool:
    return target.aim.mode in target.spec.modes
