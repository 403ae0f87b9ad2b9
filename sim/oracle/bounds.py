"""How much a plan takes that knows the whole trace beforehand: what policies are measured against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from policy.config.control import GuardConfig, ScaleConfig
from policy.config.deployment import Deployment, ModelSpec, Shape
from policy.config.gpu_sharing import gpu_group_of
from policy.errors import TargetError
from sim.arrival import Arrival
from sim.oracle.clairvoyant import Clairvoyant, clairvoyant
from sim.oracle.integer_plan import Plan
from sim.oracle.linear_program import lower_bound
from sim.oracle.problem import Problem
from sim.oracle.replica_capacity import attained_rate
from sim.oracle.verify import verify
from sim.twin.record import HOUR_S
from sim.twin.run import simulate
from sim.twin.scenario import Scenario
from sim.workload.model_names import ModelNames
from sim.workload.survey import Load, Survey

# A request is answered in about a bin. With more of them than so many the program takes long to solve.
BIN_S = 10.0
MOST_BINS = 1000
# Where a plan misses in the twin though it serves all of its fluid, replicas are taken to do so much less.
DERATES = (1.0, 0.9, 0.8)
# A plan is carried out as it is: nothing is held, and no step is too large.
_FREE = msgspec.convert(
    {"max_step_up": 100, "max_step_down": 1, "hold_s": 1e-3, "min_healthy": 0}, ScaleConfig
)


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours of a trace, or core-hours where there are no GPUs; ``None`` where nothing is known.

    ``lower_gpu_hours`` no plan can do with less than, as its replicas may be fractions that are held until
    the last request comes; so they are 0 where all come at once;
    ``achievable_gpu_hours`` are those of a clairvoyant's plan of whole replicas, which held when it was run.
    ``why`` there are none is for people.
    """

    lower_gpu_hours: float | None = None
    achievable_gpu_hours: float | None = None
    why: str = ""


def bounds_of(
    deployment: Deployment,
    arrivals: Callable[[], Iterable[Arrival]],
    surveyed: Survey,
    world: Scenario,
    *,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Bounds:
    """The bounds of all models together, for the time of a few runs; ``progress`` gets what is tried.

    The achievable plan keeps to one mode. Raises :class:`policy.errors.TargetError`, with the reason, where
    no plan meets the SLO.
    """
    lower = achievable = 0.0
    for spec in deployment.models:
        if bed := gpu_group_of(spec):  # its devices are held whatever is decided
            held_s = bed.gpus * surveyed.ends_at
            lower, achievable = lower + held_s, achievable + held_s
        elif load := surveyed.loads.get(spec.name):
            oracle = _Oracle(deployment, spec, arrivals, load, surveyed.ends_at, world, seed, progress)
            modes = oracle.modes()
            achievable += oracle.planned_s(modes)
            lower += oracle.least_s(modes)
    return Bounds(lower_gpu_hours=lower / HOUR_S, achievable_gpu_hours=achievable / HOUR_S)


class _Mode(NamedTuple):
    """A mode of the offline optimum: the capacity of one replica, and its devices."""

    name: str
    rate: float
    devices: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class _Oracle:
    """What is asked about one model."""

    deployment: Deployment
    spec: ModelSpec
    arrivals: Callable[[], Iterable[Arrival]]
    load: Load
    ends_at: float
    world: Scenario
    seed: int
    progress: Callable[[str], None]

    def modes(self) -> list[_Mode]:
        """The modes in which requests are within the SLO at some rate; one at least."""
        found = []
        for name, mode in self.spec.modes.items():
            shape, budget = self.spec.shapes[mode.shape], self.deployment.budget
            room = budget.gpus if shape.gpus else budget.cpus
            most = mode.bounds.max
            if room is not None:
                most = min(most, room // max(1, shape.gpus or shape.cpus))
            self.progress(f"{self.spec.name}: what a replica of {name} attains")
            try:
                rate = attained_rate(
                    self.deployment, self.spec, name, arrivals=self._mine, load=self.load, seed=self.seed
                )
            except ValueError:
                continue
            least = min(mode.bounds.min, most)
            found.append(_Mode(name, rate, devices_of(self.deployment, shape), least, most))
        found = [each for each in found if each.rate > 0 and each.devices]
        if not found:
            raise TargetError(f"{self.spec.name}: requests miss the SLO at any rate, in every mode")
        return found

    def least_s(self, modes: list[_Mode]) -> float:
        """Device-seconds that no plan does with less than, in one mode or in several.

        It is that of single devices, of which each does what it does in the mode that makes the most of it.
        """
        relaxed = _Mode(
            name="",
            rate=max(each.rate / each.devices for each in modes),
            devices=1,
            least=min(each.least * each.devices for each in modes),
            most=max(each.most * each.devices for each in modes),
        )
        return lower_bound(self._problem(relaxed), self.ends_at).replica_s

    def planned_s(self, modes: list[_Mode]) -> float:
        """Device-seconds of the cheapest plan that holds in the twin."""
        planned = []
        for mode in modes:
            try:
                plan = clairvoyant(self._problem(mode))
            except TargetError:
                continue
            planned.append((plan.replica_s * mode.devices, mode))
        best = math.inf
        for at_least, mode in sorted(planned):
            if at_least < best:
                self.progress(f"{self.spec.name}: what a clairvoyant takes in {mode.name}")
                best = min(best, self._held_s(mode))
        if best == math.inf:
            raise TargetError(
                f"{self.spec.name}: as many replicas as there may be cannot keep what is promised"
            )
        return best

    def _held_s(self, mode: _Mode) -> float:
        problem = self._problem(mode)
        for derate in DERATES:
            try:
                held = verify(
                    replace(problem, mu=derate * problem.mu), lambda plan: self._attained(mode.name, plan)
                )
            except (ValueError, TargetError):
                continue
            return held.plan.replica_s * mode.devices
        return math.inf

    def _attained(self, mode: str, plan: Plan) -> float:
        """Of the requests those within the SLO when the plan is run."""
        control = msgspec.structs.replace(
            self.spec.control,
            scale=_FREE,
            guard=GuardConfig(),
            mode=msgspec.structs.replace(self.spec.control.mode, sleep="never"),
        )
        only = msgspec.structs.replace(
            self.spec, modes={mode: self.spec.modes[mode]}, mode=mode, control=control
        )
        alone = msgspec.structs.replace(self.deployment, models=(only,), upstreams=())
        policies = {only.name: Clairvoyant(plan)}
        record = simulate(alone, policies, self._mine(), world=self.world, seed=self.seed)
        return float(np.mean(record.requests[only.name].met))

    def _problem(self, mode: _Mode) -> Problem:
        control, world = self.spec.control, self.world
        starts = [
            control.assumed_start_s if each is None else each for each in (world.cold_s, world.cached_s)
        ]
        wait_s = control.slo.ttft_p95_s
        bin_s = math.ceil(max(BIN_S, (self.ends_at + 1) / MOST_BINS))
        demand = np.zeros(int(self.ends_at // bin_s) + 1)
        for second, count in self.load.seconds.items():
            demand[second // bin_s] += count
        return Problem(
            demand=demand,
            bin_s=bin_s,
            mu=mode.rate,
            lead_s=min(starts),
            attainment=control.slo.attainment,
            wait_s=self.deployment.gateway.queue_timeout_s if wait_s is None else wait_s,
            least=mode.least,
            most=mode.most,
        )

    def _mine(self) -> Iterator[Arrival]:
        addressing = ModelNames([spec.name for spec in self.deployment.models])
        return (each for each in self.arrivals() if addressing.of(each) == self.spec.name)


def devices_of(deployment: Deployment, shape: Shape) -> int:
    """The GPUs of one replica, or its cores where the deployment has no GPUs."""
    gpus = any(each.gpus for spec in deployment.models for each in spec.shapes.values())
    return shape.gpus if gpus else shape.cpus
