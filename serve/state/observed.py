"""What is observed: the actuator's layers joined with the replicas' heartbeats."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from policy.config.deployment import Budget
from policy.config.gpu_sharing import gpu_group_of
from policy.scaling.rollout import MAX_FAILURES, Footprint, Layer, LayerKey
from policy.scaling.start_times import StartTimes
from policy.scaling.view import Supply
from policy.types import Replica, ReplicaPhase, StartPath
from serve.actuator.port import Held
from serve.state.replica_registry import ReplicaRegistry
from serve.state.targets import Target, Targets


class _Failed(msgspec.Struct, frozen=True, kw_only=True):
    """Starts in a row that failed, and why the last one did."""

    failures: int
    reason: str


class ObservedState:
    """The layers of each model, and what they take of the budget."""

    def __init__(self, registry: ReplicaRegistry, targets: Targets) -> None:
        self._registry = registry
        self._targets = targets
        self._failed: dict[LayerKey, _Failed] = {}
        self._start_s: dict[LayerKey, float] = {}
        self.starts = StartTimes()
        self.held: Mapping[LayerKey, Held] = {}

    def note(self, replica: Replica, at: float) -> None:
        """Learn from a heartbeat how long a start took, or why it failed."""
        key = LayerKey(replica.model, replica.shape, replica.generation)
        if self.starts.note(replica, at):
            # That others of the layer serve on says nothing of one that keeps failing.
            self._failed.pop(key, None)
        if replica.state is ReplicaPhase.READY:
            if replica.start_s is not None and replica.start_path is not StartPath.SLEEPING:
                self._start_s[key] = replica.start_s
        elif replica.state is ReplicaPhase.ASLEEP:
            # Whatever failed, it is tried anew when it is wanted.
            return
        elif replica.failures and (
            replica.state is ReplicaPhase.STARTING or replica.failures >= MAX_FAILURES
        ):
            # Kept past the replica: a host that failed too often is gone before the next tick, and
            # its last beat may be the only one that says so.
            self._failed[key] = _Failed(failures=replica.failures, reason=replica.reason)

    def cannot_start(self, key: LayerKey, reason: str) -> None:
        """A start failed before there was any replica."""
        before = self._failed[key].failures if key in self._failed else 0
        self._failed[key] = _Failed(failures=before + 1, reason=reason)

    def forgive(self, key: LayerKey) -> None:
        """Judge the layer by what comes next, not by earlier failures."""
        self._failed.pop(key, None)

    def start_s(self, key: LayerKey, assumed_s: float) -> float:
        """How long a replica takes from start to ready: measured of the layer or its shape, else assumed."""
        if self._sleeps(key):
            return self.lead_s(key, assumed_s)
        if key in self._start_s:
            return self._start_s[key]
        shape = (key.model, key.shape)
        of_shape = (
            start_s for other, start_s in self._start_s.items() if (other.model, other.shape) == shape
        )
        return max(of_shape, default=assumed_s)

    def lead_s(self, key: LayerKey, assumed_s: float) -> float:
        """How long the next start in the layer takes by the quickest way that is at hand."""
        return self.starts.lead_s(key.model, key.shape, assumed_s, sleeps=self._sleeps(key))

    def _sleeps(self, key: LayerKey) -> bool:
        return key in self.held and self.held[key].sleeps

    def lacks(self, key: LayerKey) -> bool:
        """Whether a replica of the layer is gone that was not given up."""
        layer = self.layer(key)
        return layer.starting + layer.ready < layer.wanted

    def unheard(self) -> bool:
        """Whether replicas that the actuator holds have sent no heartbeat yet."""
        return any(held.wanted > len(self._registry.of(key)) for key, held in self.held.items())

    def layer(self, key: LayerKey) -> Layer:
        """One layer as it is now."""
        held = self.held.get(key)
        states = [replica.state for replica in self._registry.of(key)]
        failed = self._failed.get(key)
        return Layer(
            wanted=held.wanted if held else 0,
            starting=states.count(ReplicaPhase.STARTING),
            ready=states.count(ReplicaPhase.READY),
            draining=states.count(ReplicaPhase.DRAINING),
            failures=failed.failures if failed else 0,
            broken=bool(held and held.trouble),
        )

    def ids(self, key: LayerKey) -> frozenset[str]:
        """The replicas of one layer."""
        return frozenset(replica.id for replica in self._registry.of(key))

    def supply(self, key: LayerKey, lead_s: float, at: float) -> Supply:
        """The layer as a policy sees it: what was asked for and nobody heard of yet is still to start."""
        layer = self.layer(key)
        starting = [r for r in self._registry.of(key) if r.state is ReplicaPhase.STARTING]
        unheard = max(0, layer.wanted - layer.starting - layer.ready)
        return Supply(
            wanted=layer.wanted,
            serving=layer.ready,
            starting_s=(*self.starts.remaining_s(starting, lead_s, at), *[lead_s] * unheard),
            draining=layer.draining,
            failures=layer.failures,
        )

    def digests(self, model: str, generation: int) -> set[str]:
        """Of which configurations and weights the held layers of a generation are."""
        return {
            held.digest
            for key, held in self.held.items()
            if (key.model, key.generation) == (model, generation)
        }

    def layers(self, model: str) -> dict[LayerKey, Layer]:
        """Every layer of ``model`` that is held or has replicas."""
        keys = {key for key in self.held if key.model == model} | self._registry.keys(model)
        return {key: self.layer(key) for key in keys}

    def reason(self, key: LayerKey) -> str:
        """What is wrong with the layer, in the engine's words or the cluster's."""
        if (failed := self._failed.get(key)) is not None:
            return failed.reason
        held = self.held.get(key)
        return held.trouble or held.waits if held else ""

    def footprints(self, target: Target) -> dict[LayerKey, Footprint]:
        """What one replica takes, for every layer that ``target`` knows or that still runs."""
        model = target.spec.name
        known = {
            LayerKey(model, shape, generation): Footprint(gpus=made.gpus, cpus=made.cpus)
            for generation, spec in target.specs.items()
            for shape, made in spec.shapes.items()
        }
        return {key: known.get(key, Footprint()) for key in {*known, *self.layers(model)}}

    def room(self, target: Target, budget: Budget) -> tuple[int | None, int | None]:
        """GPUs and CPUs that the model of ``target`` may hold: the budget less what the other models hold.

        In a bed it has room for the aim on the GPUs of the bed alone, whatever is free elsewhere.
        """
        model = target.spec.name
        taken = [self._taken(other) for other in self._targets.names() if other != model]
        gpus = None if budget.gpus is None else budget.gpus - sum(each.gpus for each in taken)
        cpus = None if budget.cpus is None else budget.cpus - sum(each.cpus for each in taken)
        bed = gpu_group_of(target.spec)
        if bed is not None and target.aim.shape in bed.engines:
            footprints = self.footprints(target)
            beside = sum(
                layer.occupied * footprints[key].gpus
                for key, layer in self.layers(model).items()
                if key.generation != target.aim.generation
            )
            gpus = beside + bed.gpus if gpus is None else min(gpus, beside + bed.gpus)
        return gpus, cpus

    def _taken(self, model: str) -> Footprint:
        """What a model holds in all; a bed holds its GPUs whoever is awake."""
        target = self._targets.get(model)
        footprints = self.footprints(target)
        beds = {key.generation for key, held in self.held.items() if key.model == model and held.sleeps}
        plans = [gpu_group_of(spec) for generation, spec in target.specs.items() if generation in beds]
        parts = [Footprint(gpus=plan.gpus, cpus=plan.cpus) for plan in plans if plan is not None]
        for key, layer in self.layers(model).items():
            if key.generation not in beds:
                each = footprints[key]
                parts.append(Footprint(gpus=layer.occupied * each.gpus, cpus=layer.occupied * each.cpus))
        return Footprint(gpus=sum(part.gpus for part in parts), cpus=sum(part.cpus for part in parts))
