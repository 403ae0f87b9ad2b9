"""The controller in virtual time: situations of all models -> production's decisions -> counts of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from policy.config.deployment import Deployment, ModelSpec
from policy.config.gpu_sharing import gpu_group_of
from policy.engine.capacity import Capability, capability
from policy.engine.profiles import price_of
from policy.scaling.decide import ModelPolicies, decide_all, workload_of
from policy.scaling.rollout import Footprint, Goal, LayerKey, leaving_layer, needs_gap, step
from policy.scaling.situation import Decision, Memory, ModeOption, Situation
from policy.scaling.view import Policy, Supply, View
from policy.signals.aggregator import SignalAggregator
from policy.signals.types import Signals
from sim.twin.fleet import Fleet

# Figures of a controller that has just begun are of nothing yet.
LISTEN_S = 5.0


class SwitchCourse:
    """What is aimed for of one model, and what its decisions remember. ``settled`` once it was reached."""

    __slots__ = ("count", "fleet", "gap", "memory", "mode", "settled", "spec")

    def __init__(self, spec: ModelSpec, fleet: Fleet) -> None:
        self.spec = spec
        self.fleet = fleet
        self.mode = spec.first_mode
        self.count = max(1, spec.modes[self.mode].bounds.min)
        self.memory = Memory()
        self.settled = True
        self.gap = False

    @property
    def key(self) -> LayerKey:
        """The layer that is aimed for."""
        return self.at_mode(self.mode)

    def at_mode(self, mode: str) -> LayerKey:
        """The layer of a mode."""
        return LayerKey(self.spec.name, self.spec.modes[mode].shape, 1)

    def footprints(self) -> dict[LayerKey, Footprint]:
        """What one replica of each layer takes."""
        return {
            LayerKey(self.spec.name, name, 1): Footprint(gpus=shape.gpus, cpus=shape.cpus)
            for name, shape in self.spec.shapes.items()
        }

    def taken(self) -> Footprint:
        """What the model holds; a bed holds its GPUs whoever is awake."""
        bed, footprints = gpu_group_of(self.spec), self.footprints()
        parts = [] if bed is None else [Footprint(gpus=bed.gpus, cpus=bed.cpus)]
        for key, layer in self.fleet.layers().items():
            if not self.fleet.sleeps(key):
                each = footprints[key]
                parts.append(Footprint(gpus=layer.occupied * each.gpus, cpus=layer.occupied * each.cpus))
        return Footprint(gpus=sum(part.gpus for part in parts), cpus=sum(part.cpus for part in parts))


class TwinController:
    """Decides for all models and carries it out. Instants are seconds of the run."""

    def __init__(
        self,
        deployment: Deployment,
        fleets: Mapping[str, Fleet],
        policies: Mapping[str, Policy],
        gathering: SignalAggregator,
    ) -> None:
        self._deployment = deployment
        self._gathering = gathering
        self._minds = {name: ModelPolicies(live=policy) for name, policy in policies.items()}
        self.courses = {spec.name: SwitchCourse(spec, fleets[spec.name]) for spec in deployment.models}
        self._slots: dict[str, int] = {}
        self.decisions: list[tuple[float, Decision]] = []
        self.switches = 0
        budget = deployment.budget
        bounds = (budget.gpus, budget.cpus, budget.watts, budget.cost_per_h)
        self._shares = any(bound is not None for bound in bounds)

    def begin(self, rates: Mapping[str, float], shapes: Mapping[str, tuple[float, float]]) -> None:
        """Have as many replicas from the beginning as the first minute's ``rates`` need.

        ``shapes`` are the mean tokens of prompts and answers of that minute. A fleet that is replayed from
        the middle of a day was there before. Whoever does not go by the load begins with the count that
        production would have, whatever comes.
        """
        for name, course in self.courses.items():
            count = self._fixed(course)
            if count is None:
                count = _needed(course, rates.get(name, 0.0), shapes.get(name, (0.0, 0.0)))
            count = min(count, course.spec.modes[course.mode].bounds.max)
            room = self._room(course)
            each = course.footprints()[course.key]
            if room[0] is not None and each.gpus:
                count = min(count, room[0] // each.gpus)
            if room[1] is not None and each.cpus:
                count = min(count, room[1] // each.cpus)
            course.count = count
            course.fleet.begin(course.key, count)

    def _fixed(self, course: SwitchCourse) -> int | None:
        """The count that a model is kept at whose policy does not go by the load."""
        spec, bounds = course.spec, course.spec.modes[course.mode].bounds
        view = View(
            at=0.0,
            tick_s=spec.control.tick_s,
            model=spec.name,
            mode=course.mode,
            count=course.count,
            least=bounds.min,
            most=bounds.max,
            supply=Supply(),
            signals=Signals(),
            capability=Capability(mu=0.0, mu_max=0.0),
            lead_s=spec.control.assumed_start_s,
        )
        proposal = self._minds[spec.name].live.decide(view, None)
        return max(proposal.count, spec.control.scale.min_healthy) if proposal.fixed else None

    def due(self, at: float, urgent: frozenset[str] = frozenset()) -> frozenset[str]:
        """The models whose turn it is, at multiples of their ticks; with one all that share a budget."""
        found = set(urgent)
        if at >= LISTEN_S:
            for name, course in self.courses.items():
                slot = math.floor(at / course.spec.control.tick_s + 1e-9)
                if self._slots.get(name) != slot:
                    self._slots[name] = slot
                    found.add(name)
        return frozenset(self.courses) if found and self._shares else frozenset(found)

    def decide(self, models: frozenset[str], at: float) -> None:
        """Decide for ``models``, and set out for what was decided."""
        situations = {name: self._situation(name, at) for name in sorted(models)}
        decided = decide_all(situations, self._deployment.budget, self._minds)
        for name, (decision, memory) in decided.items():
            course = self.courses[name]
            before = course.memory
            course.memory = memory
            if decision.dry_run or not decision.changes:
                continue
            if decision.mode != course.mode:
                if not self._switch(course, decision):
                    course.memory = msgspec.structs.replace(memory, switched_at=before.switched_at)
                    continue
                self.switches += 1
            course.count = decision.count
            course.settled = False
            self.decisions.append((at, decision))
        self.act(at)

    def act(self, at: float) -> None:
        """Take the next step of every model towards what is aimed for."""
        for course in self.courses.values():
            layers = course.fleet.layers()
            here = layers.get(course.key)
            others = any(layer.occupied for key, layer in layers.items() if key != course.key)
            if here is not None and here.ready >= course.count:
                course.settled, course.gap = True, False
                if not others and here.wanted == course.count:
                    continue
            elif here is None and not course.count:
                course.settled = True
            goal = self._goal(course, course.key, course.count)
            for key, count in step(goal, layers, course.footprints(), *self._room(course)).items():
                had = layers[key].wanted if key in layers else 0
                if had != count:
                    course.fleet.scale(key, count, at)

    def _goal(self, course: SwitchCourse, key: LayerKey, count: int) -> Goal:
        healthy = min(course.spec.control.scale.min_healthy, count)
        return Goal(key=key, count=count, min_healthy=healthy, gap=course.gap)

    def _switch(self, course: SwitchCourse, decision: Decision) -> bool:
        """Whether the queue holds the moment without replicas that the switch may leave."""
        key = course.at_mode(decision.mode)
        gap = self._leaves_a_gap(course, key, decision.count)
        lead_s = course.fleet.starts.lead_s(
            course.spec.name, key.shape, course.spec.control.assumed_start_s, sleeps=course.fleet.sleeps(key)
        )
        if gap and lead_s > self._deployment.gateway.queue_timeout_s:
            return False
        course.mode, course.gap = decision.mode, gap
        return True

    def _leaves_a_gap(self, course: SwitchCourse, key: LayerKey, count: int) -> bool:
        goal = msgspec.structs.replace(self._goal(course, key, count), gap=False)
        return needs_gap(goal, course.fleet.layers(), course.footprints(), *self._room(course, key))

    def _room(self, course: SwitchCourse, key: LayerKey | None = None) -> tuple[int | None, int | None]:
        """GPUs and CPUs that the model may hold: the budget less what the others hold."""
        budget = self._deployment.budget
        taken = [other.taken() for other in self.courses.values() if other is not course]
        gpus = None if budget.gpus is None else budget.gpus - sum(each.gpus for each in taken)
        cpus = None if budget.cpus is None else budget.cpus - sum(each.cpus for each in taken)
        bed = gpu_group_of(course.spec)
        if bed is not None and (key or course.key).shape in bed.engines:
            gpus = bed.gpus if gpus is None else min(gpus, bed.gpus)
        return gpus, cpus

    def _situation(self, name: str, at: float) -> Situation:
        course = self.courses[name]
        spec, control, fleet, key = course.spec, course.spec.control, course.fleet, course.key
        rungs = tuple(self._rung(course, mode) for mode in spec.modes)
        here = next(rung for rung in rungs if rung.mode == course.mode)
        leaving = leaving_layer(spec, fleet.layers(), key)
        signals = self._gathering.signals(name, at)
        mine = {runner.view.id for runner in fleet if runner.key == key}
        replicas = tuple(
            msgspec.structs.replace(each, slowness=fleet.slowness(each.id))
            for each in signals.replicas
            if each.id in mine
        )
        return Situation(
            at=at,
            tick_s=control.tick_s,
            model=name,
            priority=spec.priority,
            mode=course.mode,
            count=course.count,
            settled=course.settled and not leaving,
            rungs=rungs,
            supply=fleet.supply(key, here.lead_s, at),
            signals=msgspec.structs.replace(signals, replicas=replicas),
            slo=control.slo,
            scale=control.scale,
            switching=control.mode,
            guard=control.guard,
            queue_s=self._deployment.gateway.queue_timeout_s,
            leaving=leaving,
            overflow=any(name in upstream.models for upstream in self._deployment.upstreams),
            memory=course.memory,
        )

    def _rung(self, course: SwitchCourse, name: str) -> ModeOption:
        spec, fleet, budget = course.spec, course.fleet, self._deployment.budget
        mode = spec.modes[name]
        shape, key = spec.shapes[mode.shape], course.at_mode(name)
        lead_s = fleet.starts.lead_s(
            spec.name, mode.shape, spec.control.assumed_start_s, sleeps=fleet.sleeps(key)
        )
        gap = name != course.mode and self._leaves_a_gap(course, key, max(1, mode.bounds.min))
        return ModeOption(
            mode=name,
            shape=mode.shape,
            least=mode.bounds.min,
            most=mode.bounds.max,
            timing=fleet.timing(mode.shape),
            gpus=shape.gpus,
            cpus=shape.cpus,
            watts=shape.gpus * budget.gpu_watts + shape.cpus * budget.cpu_watts,
            cost_per_h=price_of(shape, budget),
            lead_s=lead_s,
            gap_s=lead_s if gap else 0.0,
        )


def _needed(course: SwitchCourse, rate: float, shape: tuple[float, float]) -> int:
    """How many replicas ``rate`` requests per second of that shape need, and how many there are at least."""
    spec, (inputs, outputs) = course.spec, shape
    count = max(spec.modes[course.mode].bounds.min, 1 if rate else 0)
    if inputs:
        load = msgspec.structs.replace(workload_of(None), input_tokens=inputs, output_tokens=outputs)
        able = capability(course.fleet.timing(course.key.shape), load, spec.control.slo)
        if mu := able.mu or able.mu_max:
            count = max(count, math.ceil(rate / mu))
    return count
