"""Builds the situation of each model, all that a decision may depend on, from targets and observations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from policy.config.deployment import Deployment, ModelSpec, ResourceBudget
from policy.engine.builtin_profiles import price_of, shipped
from policy.engine.online_calibration import CalibrationFit
from policy.engine.performance_model import EngineModel, Timing
from policy.engine.prefill_estimate import GENERIC
from policy.scaling.budget_allocation import held
from policy.scaling.budget_resources import Resources, total
from policy.scaling.decision_types import DecisionMemory, Situation
from policy.scaling.model_observation import ReplicaFacts, signals_of
from policy.scaling.reconcile_steps import LayerKey
from policy.signals.aggregator import SignalAggregator
from policy.signals.types import Signals
from policy.wire.heartbeat import Heartbeat
from serve.autoscaler.live_model_fitting import CalibrationStore
from serve.state.desired_state import ModelTarget, ModelTargets
from serve.state.observed_state import ObservedState
from store.time_zones import wall_clock_s

# The 95th percentile of the power of a replica's GPUs over this many samples counts against the budget.
LOOKS = 120
PART = 0.95


@dataclass(eq=False)
class SituationBuilder:
    """One for all models; ``now`` returns seconds of a clock that never goes back."""

    targets: ModelTargets
    observed: ObservedState
    calibrations: CalibrationStore
    aggregator: SignalAggregator
    now: Callable[[], float]
    _watts: dict[tuple[str, str], deque[float]] = field(default_factory=dict, init=False)
    _reported: dict[LayerKey, Timing] = field(default_factory=dict, init=False)

    def situation(self, model: str, deployment: Deployment, memory: DecisionMemory, at: float) -> Situation:
        """The situation of ``model`` at ``at`` (Unix seconds)."""
        target = self.targets.get(model)
        seen = self.observed.model(target, deployment.budget)
        mode_options = tuple(
            seen.option(mode, self._facts(target, mode, deployment.budget))
            for mode in target.spec.modes
            if mode == target.aim.mode or not target.blocked(mode, at)
        )
        here = next(option for option in mode_options if option.mode == target.aim.mode)
        key, speed = target.key(), here.timing.model
        signals = signals_of(
            self.aggregator.signals(model, self.now()),
            frozenset(replica.id for replica in self.observed.registry.of(key)),
            lambda replica: self.calibrations.slowness(replica, speed, self.now()),
        )
        self._note_watts(target, signals)
        supply = self.observed.supply(key, here.lead_s, self.now())
        return seen.situation(
            deployment, mode_options, supply, signals,
            at=at, settled=target.settled, memory=memory, override=target.override(at),
            wall_clock=lambda zone: wall_clock_s(zone, at),
        )  # fmt: skip

    def note(self, beat: Heartbeat) -> None:
        """Learn the limits and step times that a replica reports."""
        replica, key = beat.replica, LayerKey.of(beat.replica)
        if replica.model not in self.targets.names():
            return
        target = self.targets.get(replica.model)
        spec = target.specs.get(replica.generation)
        if spec is None or replica.shape not in spec.shapes:
            return
        if beat.engine is not None and beat.engine.timing is not None:
            self._reported[key] = beat.engine.timing
        prior = self._timing(spec, replica.shape, replica.generation).model
        assert prior is not None
        crowded = not spec.shapes[replica.shape].gpus and self._shares_cores(key)
        # Engines of a leaving revision may differ: each would undo what was learned from the other.
        learns = not crowded and replica.generation == target.aim.generation
        self.calibrations.take(beat, spec, prior, self.now(), learns=learns)

    def _shares_cores(self, own: LayerKey) -> bool:
        """Whether other replicas start or other layers run, which slow it down on cores."""
        layers = self.observed.layers(own.model)
        return any(layer.starting or (layer.occupied and key != own) for key, layer in layers.items())

    def beside(self, models: Iterable[str], deployment: Deployment, at: float) -> Resources:
        """What ``models`` leave of the budget."""
        left = total(deployment.budget)
        for model in models:
            left = left.plus(held(self.situation(model, deployment, DecisionMemory(), at)), -1)
        return left

    def takes(self, target: ModelTarget, budget: ResourceBudget) -> Resources:
        """What one replica of the desired mode takes of the budget."""
        shape = target.spec.shapes[target.aim.shape]
        watts = self._needs(target, target.aim.shape, budget)
        return Resources(shape.gpus, shape.cpus, watts, price_of(shape, budget))

    def _timing(self, spec: ModelSpec, shape: str, generation: int) -> Timing:
        """The engine model and limits that replicas of a shape report, else those of its profile."""
        timing = shipped(spec, spec.shapes[shape])
        reported = self._reported.get(LayerKey(spec.name, shape, generation))
        if reported is None:
            return timing
        seats = reported.limits.max_num_seqs
        seats = min(seats, spec.shapes[shape].max_in_flight or seats)
        limits = replace(reported.limits, max_num_seqs=seats)
        return Timing(limits=limits, model=reported.model or timing.model)

    def _facts(self, target: ModelTarget, mode: str, budget: ResourceBudget) -> ReplicaFacts:
        spec, name = target.spec, target.spec.modes[mode].shape
        timing = self._timing(spec, name, target.aim.generation)
        assert timing.model is not None
        fit = self._fit(target, name, timing.model)
        key = LayerKey(spec.name, name, target.aim.generation)
        return ReplicaFacts(
            timing=replace(timing, model=fit.model),
            watts=self._needs(target, name, budget),
            lead_s=self.observed.lead_s(key, spec.control.assumed_start_s),
            version=fit.version,
            error=fit.error,
        )

    def _fit(self, target: ModelTarget, shape: str, prior: EngineModel) -> CalibrationFit:
        """The engine model of a shape: measured where possible, else assumed.

        On cores, the correction that was measured on the running shape applies to an idle shape too: its old
        measurement reflects old contention, and modes are compared under the present one.
        """
        spec = target.spec
        fit = self.calibrations.fitted(spec, shape)
        assumed = self.calibrations.assumed(spec, shape, prior)
        idle = shape != target.aim.shape and not spec.shapes[shape].gpus
        if assumed is not None and (fit is None or (idle and prior != GENERIC.model)):
            return CalibrationFit(model=assumed)
        return fit or CalibrationFit(model=prior)

    def _note_watts(self, target: ModelTarget, signals: Signals) -> None:
        watts = [each.watts for each in signals.replicas if each.watts is not None]
        if watts:
            key = (target.spec.name, target.aim.shape)
            self._watts.setdefault(key, deque(maxlen=LOOKS)).append(max(watts))

    def _needs(self, target: ModelTarget, shape: str, budget: ResourceBudget) -> float:
        """Watts of one replica: its GPUs as measured, else as assumed, and its cores as assumed."""
        made = target.spec.shapes[shape]
        measured = self._watts.get((target.spec.name, shape))
        gpus = made.gpus * budget.gpu_watts
        if measured:
            gpus = sorted(measured)[int(PART * (len(measured) - 1))]
        return gpus + made.cpus * budget.cpu_watts
