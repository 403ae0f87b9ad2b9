"""The controller in virtual time: situations of all models -> production's decisions -> counts of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from policy.config.deployment import Deployment, ModelSpec
from policy.config.shared_gpus import gpu_group_of
from policy.engine.replica_capacity import Capability, capability
from policy.errors import SwitchRefused
from policy.scaling.budget_resources import Resources, summed
from policy.scaling.decide import ModelPolicies, decide_all, workload_of
from policy.scaling.decision_schedule import DecisionSchedule
from policy.scaling.decision_types import Decision, DecisionMemory, Situation
from policy.scaling.model_observation import ObservedModel, ReplicaFacts, held_by, signals_of
from policy.scaling.reconcile_steps import LayerKey, closes_s
from policy.scaling.view import Policy, Supply, View
from policy.signals.aggregator import SignalAggregator
from policy.signals.types import Signals
from policy.types import ReplicaPhase
from sim.simulator.fleet import Fleet
from store.time_zones import wall_clock_s

# A simulated deployment is never changed: its replicas are all of one generation.
GENERATION = 1


class SwitchCourse:
    """The desired state of one model, and the memory of its decisions; ``settled`` once it was reached.

    ``footprints`` are what one replica of each layer takes.
    """

    def __init__(self, spec: ModelSpec, fleet: Fleet) -> None:
        self.spec = spec
        self.fleet = fleet
        self.mode = spec.first_mode
        self.count = max(1, spec.modes[self.mode].bounds.min)
        self.memory = DecisionMemory()
        self.settled = True
        self.gap = False
        group = gpu_group_of(spec)
        self.groups = {} if group is None else {GENERATION: group}
        self.footprints = {
            LayerKey(spec.name, name, GENERATION): Resources(shape.gpus, shape.cpus)
            for name, shape in spec.shapes.items()
        }

    @property
    def key(self) -> LayerKey:
        return LayerKey(self.spec.name, self.spec.modes[self.mode].shape, GENERATION)

    def held(self) -> Resources:
        """What the replicas of the model hold."""
        return held_by(self.fleet.layers(), self.footprints, self.groups)


class SimulatedController:
    """Decides for all models and carries decisions out. Instants are seconds of the run."""

    def __init__(
        self,
        deployment: Deployment,
        fleets: Mapping[str, Fleet],
        policies: Mapping[str, Policy],
        aggregator: SignalAggregator,
        starts_at: float = 0.0,
    ) -> None:
        """``starts_at`` is the beginning of the run in Unix seconds."""
        self._deployment = deployment
        self._starts_at = starts_at
        self._aggregator = aggregator
        self._policies = {name: ModelPolicies(live=policy) for name, policy in policies.items()}
        self.courses = {spec.name: SwitchCourse(spec, fleets[spec.name]) for spec in deployment.models}
        self._schedule = DecisionSchedule(0.0)
        self._ticks_s = {spec.name: spec.control.tick_s for spec in deployment.models}
        self.decisions: list[tuple[float, Decision]] = []
        self.switches = 0

    def begin(self, rates: Mapping[str, float], shapes: Mapping[str, tuple[float, float]]) -> None:
        """Start with as many replicas as the ``rates`` of the first minute need.

        ``shapes`` are the mean tokens of prompts and answers of that minute. A fixed policy starts with its
        own count.
        """
        for name, course in self.courses.items():
            count = self._fixed(course)
            if count is None:
                count = _needed(course, rates.get(name, 0.0), shapes.get(name, (0.0, 0.0)))
            count = min(count, course.spec.modes[course.mode].bounds.max)
            model = self._observed(course)
            each = model.footprints[course.key]
            course.count = count = min(count, model.bounds().holds(each))
            course.fleet.begin(course.key, count)

    def _fixed(self, course: SwitchCourse) -> int | None:
        spec, bounds = course.spec, course.spec.modes[course.mode].bounds
        view = View(
            at=0.0,
            model=spec.name,
            mode=course.mode,
            count=course.count,
            least=bounds.min,
            most=bounds.max,
            tick_s=spec.control.tick_s,
            lead_s=spec.control.assumed_start_s,
            supply=Supply(),
            signals=Signals(),
            capability=Capability(mu=0.0, mu_max=0.0),
        )
        proposal = self._policies[spec.name].live.decide(view, None)
        return max(proposal.count, spec.control.scale.min_healthy) if proposal.fixed else None

    def due(self, at: float, urgent: frozenset[str] = frozenset()) -> frozenset[str]:
        """The models whose turn it is, at multiples of their ticks; with one all that share a budget."""
        budget = self._deployment.budget
        return frozenset(self._schedule.due(self._ticks_s, at, budget, urgent=urgent))

    def decide(self, models: frozenset[str], at: float) -> None:
        """Decide for ``models``, and set out for what was decided."""
        situations = {name: self._situation(name, at) for name in sorted(models)}
        decided = decide_all(situations, self._deployment.budget, self._policies)
        for name, (decision, memory) in decided.items():
            course = self.courses[name]
            before = course.memory
            course.memory = memory
            if decision.dry_run or not decision.changes:
                continue
            if decision.mode != course.mode:
                if not self._switch(course, decision, at):
                    course.memory = msgspec.structs.replace(memory, switched_at=before.switched_at)
                    continue
                self.switches += 1
            course.count = decision.count
            course.settled = False
            self.decisions.append((at, decision))
        self.act(at)

    def act(self, at: float) -> None:
        """Take the next step of every model towards its desired state."""
        for course in self.courses.values():
            layers = course.fleet.layers()
            here = layers.get(course.key)
            others = any(layer.occupied for key, layer in layers.items() if key != course.key)
            if here is not None and here.ready >= course.count:
                course.settled, course.gap = True, False
                course.fleet.ends_at = math.inf
                if not others and here.wanted == course.count:
                    self._close(course, at)
                    continue
            elif here is None and not course.count:
                course.settled = True
            closing = self._close(course, at)
            rollout = self._observed(course)._replace(closing=closing).rollout()
            counts = rollout.step()
            if course.fleet.ends_at < math.inf and not closing and rollout.keeps_others(counts):
                course.fleet.ends_at = math.inf
                self._close(course, at)
            for key, count in counts.items():
                before = layers[key].wanted if key in layers else 0
                if before != count:
                    course.fleet.scale(key, count, at)

    def _close(self, course: SwitchCourse, at: float) -> bool:
        """Tell the gateway until when other layers serve; returns whether they do."""
        fleet = course.fleet
        fleet.goal = course.key
        drains = any(each.state is ReplicaPhase.DRAINING and each.key != course.key for each in fleet)
        fleet.gives_way = not course.settled and (fleet.gives_way or drains)
        if fleet.ends_at == math.inf:
            fleet.closes_at = fleet.closing_since = math.inf
            return False
        most_s = course.spec.control.mode.drain_timeout_s
        left_s = closes_s(fleet.ends_at - at, most_s, self._aggregator.drain_s(course.spec.name, at))
        fleet.closes_at, fleet.closing_since = at + left_s, min(fleet.closing_since, at)
        return left_s > 0

    def _switch(self, course: SwitchCourse, decision: Decision, at: float) -> bool:
        """Switch, unless the queue cannot hold the moment without replicas that this would leave."""
        proposed = self._observed(course).in_mode(decision.mode, decision.count)
        start_s = self._lead_s(course, proposed.key)
        most_s = course.spec.control.mode.drain_timeout_s
        drain_s = min(self._aggregator.drain_s(course.spec.name, at), most_s)
        try:
            gap = proposed.check_gap(start_s, drain_s, self._deployment.gateway.queue_timeout_s)
        except SwitchRefused:
            return False
        course.mode, course.gap = decision.mode, gap
        course.fleet.ends_at = at + most_s if gap and proposed.rollout().stops() else math.inf
        return True

    def _observed(self, course: SwitchCourse) -> ObservedModel:
        others = [other.held() for other in self.courses.values() if other is not course]
        return ObservedModel(
            spec=course.spec,
            mode=course.mode,
            key=course.key,
            replicas=course.count,
            layers=course.fleet.layers(),
            footprints=course.footprints,
            budget=self._deployment.budget,
            others=summed(others),
            groups=course.groups,
            gap=course.gap,
        )

    def _situation(self, name: str, at: float) -> Situation:
        course = self.courses[name]
        fleet, model = course.fleet, self._observed(course)
        options = tuple(model.option(mode, self._facts(course, mode)) for mode in course.spec.modes)
        here = next(option for option in options if option.mode == course.mode)
        mine = {runner.view.id for runner in fleet if runner.key == course.key}
        signals = signals_of(self._aggregator.signals(name, at), mine, fleet.slowness)
        supply = fleet.supply(course.key, here.lead_s, at)
        return model.situation(
            self._deployment, options, supply, signals,
            at=at, settled=course.settled, memory=course.memory,
            wall_clock=lambda zone: wall_clock_s(zone, self._starts_at + at),
        )  # fmt: skip

    def _facts(self, course: SwitchCourse, mode: str) -> ReplicaFacts:
        name, budget = course.spec.modes[mode].shape, self._deployment.budget
        shape = course.spec.shapes[name]
        return ReplicaFacts(
            timing=course.fleet.timing(name),
            watts=shape.gpus * budget.gpu_watts + shape.cpus * budget.cpu_watts,
            lead_s=self._lead_s(course, LayerKey(course.spec.name, name, GENERATION)),
        )

    @staticmethod
    def _lead_s(course: SwitchCourse, key: LayerKey) -> float:
        starts, assumed_s = course.fleet.starts, course.spec.control.assumed_start_s
        return starts.lead_s(key.model, key.shape, assumed_s, sleeps=course.fleet.sleeps(key))


def _needed(course: SwitchCourse, rate: float, shape: tuple[float, float]) -> int:
    """How many replicas ``rate`` requests per second of that shape need, within the least count."""
    spec, (inputs, outputs) = course.spec, shape
    count = max(spec.modes[course.mode].bounds.min, 1 if rate else 0)
    if inputs:
        load = msgspec.structs.replace(workload_of(None), input_tokens=inputs, output_tokens=outputs)
        able = capability(course.fleet.timing(course.key.shape), load, spec.control.strictest_slo)
        if mu := able.mu or able.mu_max:
            count = max(count, math.ceil(rate / mu))
    return count
