"""A model as a controller observes it, and the situation for its next decision.

The live controller and the simulator's both build their situations here: they differ in where observations
come from, not in what a decision is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import msgspec

from policy.config.deployment import Deployment, ModelSpec, ResourceBudget
from policy.config.shared_gpus import GpuGroup
from policy.engine.builtin_profiles import price_of
from policy.engine.performance_model import Timing
from policy.errors import SwitchRefused
from policy.scaling.budget_resources import Resources, summed, total
from policy.scaling.decision_types import DecisionMemory, ModeOption, ModeOverride, Situation
from policy.scaling.reconcile_steps import (
    Layer,
    LayerKey,
    RolloutGoal,
    RolloutPlanner,
    SharedGpus,
    leaving_layer,
)
from policy.scaling.view import Supply
from policy.signals.types import Signals
from policy.types import Priority


class ReplicaFacts(NamedTuple):
    """What is known of one replica of a mode.

    ``timing`` is its engine model, by ``version`` (0: as shipped) and with the relative ``error`` that it
    showed; ``watts`` is its power, ``lead_s`` the seconds from start to ready by the quickest path.
    """

    timing: Timing
    watts: float
    lead_s: float
    version: int = 0
    error: float = 0.0


class ObservedModel(NamedTuple):
    """What is desired of a model (``replicas`` of ``mode``, in the layer ``key``) and what it has.

    ``footprints`` are the resources of one replica of each layer, ``others`` those that all other models hold
    of the ``budget``, ``groups`` the shared GPU groups by generation. ``gap`` allows the switch that is under
    way to fall below ``min_healthy`` replicas; while it is ``closing``, no replica is drained for it yet.
    """

    spec: ModelSpec
    mode: str
    key: LayerKey
    replicas: int
    layers: Mapping[LayerKey, Layer]
    footprints: Mapping[LayerKey, Resources]
    budget: ResourceBudget
    others: Resources
    groups: Mapping[int, GpuGroup] = {}
    gap: bool = False
    closing: bool = False

    def rollout(self, extra: int = 0) -> RolloutPlanner:
        """The steps to what is desired, with ``extra`` replicas while one is replaced."""
        healthy = min(self.spec.control.scale.min_healthy, self.replicas)
        goal = RolloutGoal(
            key=self.key, count=self.replicas + extra, min_healthy=healthy, gap=self.gap, closing=self.closing
        )
        groups = tuple(
            SharedGpus(
                Resources(group.gpus, group.cpus),
                frozenset(LayerKey(self.key.model, shape, generation) for shape in group.engines),
            )
            for generation, group in self.groups.items()
        )
        return RolloutPlanner(goal, self.layers, self.footprints, self.bounds(), groups)

    def in_mode(self, mode: str, count: int) -> ObservedModel:
        """The same model with ``count`` replicas of ``mode`` desired."""
        key = LayerKey(self.key.model, self.spec.modes[mode].shape, self.key.generation)
        return self._replace(mode=mode, key=key, replicas=count, gap=False)

    def bounds(self) -> Resources:
        """What the model may hold: the budget less the others' share."""
        return total(self.budget).plus(self.others, -1)

    def check_gap(self, start_s: float, drain_s: float, queue_s: float) -> bool:
        """Whether the switch leaves a gap, which the queue can hold.

        Raises :class:`policy.errors.SwitchRefused` where the drain of what runs (``drain_s``) and the start
        (``start_s``) take longer than requests may wait (``queue_s``).
        """
        if not self.rollout().needs_gap():
            return False
        if drain_s + start_s > queue_s:
            drains = f" after a drain of {drain_s:.0f} s" if drain_s >= 1 else ""
            raise SwitchRefused(
                f"{self.spec.name}: {self.mode} x {self.replicas}, generation {self.key.generation} needs"
                f" resources that the running replicas hold, and its start takes about {start_s:.0f} s"
                f"{drains}: gateway.queue_timeout_s = {queue_s:g} s cannot hold the requests that"
                " arrive meanwhile"
            )
        return True

    def option(self, mode: str, facts: ReplicaFacts) -> ModeOption:
        """One mode that the model may be in."""
        wanted = self.spec.modes[mode]
        shape, bounds = self.spec.shapes[wanted.shape], wanted.bounds
        gap = mode != self.mode and self.in_mode(mode, max(1, bounds.min)).rollout().needs_gap()
        return ModeOption(
            mode=mode,
            shape=wanted.shape,
            least=bounds.min,
            most=bounds.max,
            gpus=shape.gpus,
            cpus=shape.cpus,
            cost_per_h=price_of(shape, self.budget),
            watts=facts.watts,
            timing=facts.timing,
            version=facts.version,
            error=facts.error,
            lead_s=facts.lead_s,
            gap_s=facts.lead_s if gap else 0.0,
        )

    def situation(
        self,
        deployment: Deployment,
        mode_options: tuple[ModeOption, ...],
        supply: Supply,
        signals: Signals,
        *,
        at: float,
        settled: bool,
        memory: DecisionMemory,
        override: ModeOverride | None = None,
        wall_clock: Callable[[str], float],
    ) -> Situation:
        """All that the decision at ``at`` may depend on; ``settled`` once the desired state was reached.

        ``wall_clock`` returns the present time of a time zone, in seconds since 1970-01-01 00:00 there.
        """
        name, control = self.spec.name, self.spec.control
        leaving = leaving_layer(self.spec, self.layers, self.key)
        return Situation(
            at=at,
            tick_s=control.tick_s,
            model=name,
            priority=self.spec.priority,
            mode=self.mode,
            count=self.replicas,
            settled=settled and not leaving,
            mode_options=mode_options,
            supply=supply,
            signals=signals,
            slo=control.strictest_slo,
            scale=control.scale,
            switching=control.mode,
            guard=control.guard,
            queue_s=deployment.gateway.queue_timeout_s,
            leaving=leaving,
            spillover=any(name in upstream.models for upstream in deployment.upstreams),
            override=override,
            memory=memory,
            slo_by_priority={each: control.slo_of(each) for each in Priority}
            if control.slo_by_priority
            else {},
            wall_clocks={each.timezone: wall_clock(each.timezone) for each in control.scale.schedules},
        )


def held_by(
    layers: Mapping[LayerKey, Layer], footprints: Mapping[LayerKey, Resources], groups: Mapping[int, GpuGroup]
) -> Resources:
    """What the replicas of a model hold.

    The generations in ``groups`` are shared GPU groups: they hold their GPUs whichever engines are awake.
    """
    alone = {key: layer for key, layer in layers.items() if key.generation not in groups}
    shared = summed(Resources(group.gpus, group.cpus) for group in groups.values())
    return shared.plus(summed(Resources().plus(footprints[key], of.occupied) for key, of in alone.items()))


def signals_of(signals: Signals, ids: Collection[str], slowness: Callable[[str], float]) -> Signals:
    """Signals with only the replicas ``ids``, each with how many times as long its steps take as expected.

    During a switch other layers serve too: their load and speed say nothing of the new layer.
    """
    replicas = tuple(
        msgspec.structs.replace(each, slowness=slowness(each.id))
        for each in signals.replicas
        if each.id in ids
    )
    return msgspec.structs.replace(signals, replicas=replicas)
