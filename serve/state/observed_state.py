"""The observed state: the actuator's layers joined with the replicas' heartbeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from policy.config.deployment import Deployment, ResourceBudget
from policy.config.shared_gpus import GpuGroup, gpu_group_of
from policy.scaling.budget_resources import Resources, summed
from policy.scaling.gpu_group_commands import is_prepared
from policy.scaling.model_observation import ObservedModel, held_by
from policy.scaling.reconcile_steps import MAX_FAILURES, Layer, LayerKey, closes_s
from policy.scaling.start_times import StartTimes
from policy.scaling.view import Supply
from policy.types import Replica, ReplicaPhase, StartPath
from serve.actuator.interface import ActuatorLayer
from serve.state.desired_state import ModelTarget, ModelTargets
from serve.state.replica_registry import ReplicaRegistry

# How long the cluster may take to place a waiting replica once another has left, and to say so.
PLACED_S = 5.0


class _FailedStarts(NamedTuple):
    """Starts in a row that failed, and why the last one did."""

    times: int
    reason: str


@dataclass(eq=False)
class ObservedState:
    """The layers of each model, and what they take of the budget.

    ``drain_s`` returns in how many seconds the last of a model's running requests is expected to end.
    """

    registry: ReplicaRegistry
    targets: ModelTargets
    drain_s: Callable[[str], float] = lambda model: 0.0
    starts: StartTimes = field(default_factory=StartTimes, init=False)
    held: Mapping[LayerKey, ActuatorLayer] = field(default_factory=dict, init=False)
    _failed: dict[LayerKey, _FailedStarts] = field(default_factory=dict, init=False)
    _start_s: dict[LayerKey, float] = field(default_factory=dict, init=False)
    # The last heartbeat of any replica, and of one that left, by model.
    _seen_at: float = field(default=0.0, init=False)
    _left_at: dict[str, float] = field(default_factory=dict, init=False)

    def note(self, replica: Replica, at: float) -> None:
        """Learn from a heartbeat how long a start took, or why it failed."""
        key = LayerKey.of(replica)
        self._seen_at = at
        if replica.state in (ReplicaPhase.DRAINING, ReplicaPhase.STOPPED):
            self._left_at[replica.model] = at
        if self.starts.note(replica, at):
            # Only a new success clears failures: other replicas of the layer may be serving.
            self._failed.pop(key, None)
        if replica.state in (ReplicaPhase.READY, ReplicaPhase.ASLEEP):
            # An engine that sleeps is started again when it is needed: earlier failures do not count.
            if replica.start_s is not None and replica.start_path is not StartPath.SLEEPING:
                self._start_s[key] = replica.start_s
        elif replica.failures and (
            replica.state is ReplicaPhase.STARTING or replica.failures >= MAX_FAILURES
        ):
            # Kept after the replica is gone: the last heartbeat of a failing host may be the only report.
            self._failed[key] = _FailedStarts(replica.failures, replica.reason)

    def ordered(self, key: LayerKey, count: int, at: float, *, was: int) -> None:
        """The actuator took an order of ``at``: it holds ``count`` replicas of the layer, and ``was`` before.

        A refused order is none: it is retried, and each retry would count as a request.
        """
        layer = self.layer(key)
        self.starts.requested(key, count - was, at, count - layer.starting - layer.ready)

    def cannot_start(self, key: LayerKey, reason: str) -> None:
        """A start failed before there was any replica."""
        before = self._failed[key].times if key in self._failed else 0
        self._failed[key] = _FailedStarts(before + 1, reason)

    def clear_failures(self, key: LayerKey) -> None:
        """Forget earlier start failures of the layer."""
        self._failed.pop(key, None)

    def start_s(self, key: LayerKey, assumed_s: float) -> float:
        """How long a replica takes from start to ready: measured of the layer or its shape, else assumed."""
        if self._sleeps(key):
            return self.lead_s(key, assumed_s)
        if key in self._start_s:
            return self._start_s[key]
        shape, starts = (key.model, key.shape), self._start_s.items()
        measured = [start_s for other, start_s in starts if (other.model, other.shape) == shape]
        return max(measured, default=assumed_s)

    def lead_s(self, key: LayerKey, assumed_s: float) -> float:
        """How long the next start in the layer takes by the quickest way that is at hand."""
        return self.starts.lead_s(key.model, key.shape, assumed_s, sleeps=self._sleeps(key))

    def _sleeps(self, key: LayerKey) -> bool:
        """Whether there are engines to wake."""
        group = key in self.held and self.held[key].sleeps
        return group and any(map(is_prepared, self.registry.of(key)))

    def is_short(self, key: LayerKey) -> bool:
        """Whether a replica of the layer is missing that was not scaled down."""
        layer = self.layer(key)
        return layer.starting + layer.ready < layer.wanted

    def unreported(self) -> bool:
        """Whether replicas that the actuator holds have sent no heartbeat yet."""
        return any(held.wanted > len(self.registry.of(key)) for key, held in self.held.items())

    def layer(self, key: LayerKey) -> Layer:
        """One layer as it is now."""
        held = self.held.get(key)
        states = [replica.state for replica in self.registry.of(key)]
        failed = self._failed.get(key)
        left_at = self._left_at.get(key.model, -math.inf)
        return Layer(
            wanted=held.wanted if held else 0,
            starting=states.count(ReplicaPhase.STARTING),
            ready=states.count(ReplicaPhase.READY),
            draining=states.count(ReplicaPhase.DRAINING),
            failures=failed.times if failed else 0,
            broken=bool(held and held.trouble),
            unplaced=held.unplaced if held and self._seen_at - left_at > PLACED_S else 0,
        )

    def supply(self, key: LayerKey, lead_s: float, at: float) -> Supply:
        """The layer as a policy sees it."""
        starting = [r for r in self.registry.of(key) if r.state is ReplicaPhase.STARTING]
        return self.starts.supply(self.layer(key), starting, lead_s, at)

    def layers(self, model: str) -> dict[LayerKey, Layer]:
        """Every layer of ``model`` that is held or has replicas."""
        keys = {key for key in self.held if key.model == model} | self.registry.keys(model)
        return {key: self.layer(key) for key in keys}

    def reason(self, key: LayerKey) -> str:
        """The error of the layer as the engine or the cluster reports it."""
        if (failed := self._failed.get(key)) is not None:
            return failed.reason
        held = self.held.get(key)
        return held.trouble or held.waits if held else ""

    def model(self, target: ModelTarget, budget: ResourceBudget) -> ObservedModel:
        """The model of ``target``: what is desired, what it has, and what the others hold of the budget."""
        name = target.spec.name
        others = [self.footprint(other) for other in self.targets.names() if other != name]
        return ObservedModel(
            spec=target.spec,
            mode=target.aim.mode,
            key=target.key(),
            replicas=target.aim.count,
            layers=self.layers(name),
            footprints=self._footprints(target),
            budget=budget,
            others=summed(others),
            groups=_groups(target),
            gap=target.gap,
        )

    def planned(self, proposed: ModelTarget, deployment: Deployment) -> ModelTarget:
        """``proposed`` with what its switch takes: a moment with too few replicas, which the queue can hold.

        Raises :class:`policy.errors.SwitchRefused` when the queue cannot.
        """
        assumed_s = proposed.spec.control.assumed_start_s
        start_s = sum(self.start_s(key, assumed_s) for key in self._started_in_turn(proposed))
        model = self.model(proposed, deployment.budget)
        most_s = proposed.spec.control.mode.drain_timeout_s
        drain_s = min(self.drain_s(proposed.spec.name), most_s)
        gap = model.check_gap(start_s, drain_s, deployment.gateway.queue_timeout_s)
        # Where some serve throughout, none has to be closed before the others drain.
        closes = gap and model.rollout().stops()
        return replace(proposed, gap=gap, ends_at=proposed.since + most_s if closes else None)

    def closes_s(self, target: ModelTarget, at: float) -> float:
        """In how many seconds the replicas of other layers drain for ``target``; 0 if they may at once.

        When the last of the running requests is expected to end, within the drain timeout of the switch.
        """
        if target.ends_at is None:
            return 0.0
        most_s = target.spec.control.mode.drain_timeout_s
        return closes_s(target.ends_at - at, most_s, self.drain_s(target.spec.name))

    def waits_for_drain(self, target: ModelTarget, at: float) -> bool:
        """Whether nothing of ``target`` starts yet because replicas of other layers drain or are about to."""
        if self.layer(target.key()).starting:
            return False
        others = [layer for key, layer in self.layers(target.spec.name).items() if key != target.key()]
        closing = self.closes_s(target, at) > 0 and any(layer.ready for layer in others)
        return closing or any(layer.draining for layer in others)

    def start_timeout_s(self, target: ModelTarget) -> float:
        """How long the layer of ``target`` may take until its replicas are ready."""
        return target.spec.control.start_timeout_s * len(self._started_in_turn(target))

    def _started_in_turn(self, target: ModelTarget) -> list[LayerKey]:
        """The layers that start one after the other for ``target``: all of a shared GPU group that is new."""
        key, group = target.key(), _groups(target).get(target.aim.generation)
        placed = key in self.held and self.held[key].sleeps
        if group is None or key.shape not in group.engines or placed:
            return [key]
        return [LayerKey(key.model, shape, key.generation) for shape in group.engines]

    def _footprints(self, target: ModelTarget) -> dict[LayerKey, Resources]:
        """What one replica takes, for every layer that ``target`` knows or that still runs."""
        model = target.spec.name
        known = {
            LayerKey(model, shape, generation): Resources(made.gpus, made.cpus)
            for generation, spec in target.specs.items()
            for shape, made in spec.shapes.items()
        }
        return {key: known.get(key, Resources()) for key in {*known, *self.layers(model)}}

    def footprint(self, model: str) -> Resources:
        """What the replicas of ``model`` take of the budget's GPUs and cores."""
        target = self.targets.get(model)
        asleep = {key.generation for key, held in self.held.items() if key.model == model and held.sleeps}
        groups = {generation: group for generation, group in _groups(target).items() if generation in asleep}
        return held_by(self.layers(model), self._footprints(target), groups)


def _groups(target: ModelTarget) -> dict[int, GpuGroup]:
    """The shared GPU groups of ``target`` by generation."""
    groups = {generation: gpu_group_of(spec) for generation, spec in target.specs.items()}
    return {generation: group for generation, group in groups.items() if group is not None}
