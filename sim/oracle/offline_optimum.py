"""The offline optimum of a deployment: GPU-hours that policies are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from policy.config.control import GuardConfig, ScaleConfig
from policy.config.deployment import Deployment, ModelSpec
from policy.config.shared_gpus import gpu_group_of
from policy.engine.builtin_profiles import shipped
from policy.errors import TargetError
from policy.scaling.budget_resources import ROUNDING
from sim.arrivals import Arrival
from sim.oracle.clairvoyant import ClairvoyantPolicy, ReplicaCountPlan, clairvoyant, verify
from sim.oracle.least_work import least_problem, least_work, tokens_of
from sim.oracle.linear_program import lower_bound
from sim.oracle.provisioning_problem import ProvisioningProblem
from sim.oracle.replica_capacity import TRIALS, Trials, attained_rate
from sim.simulator.fault_scenario import FaultScenario
from sim.simulator.run import simulate
from sim.simulator.run_record import HOUR_S
from sim.workload.per_model_load import ModelLoad, ModelNames, TraceLoad

# About the duration of a request; more bins than this take long to solve.
BIN_S = 10.0
MOST_BINS = 1000
# Capacity factors of a plan that are tried while it meets the SLO in the simulator, since large pools take
# more together and cache more prefixes, or fewer replicas meet it too; those of DERATES until it does.
UPRATES = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.4, 2.9, 3.5, 4.2, 5.0, 6.0, 8.0)
DERATES = (0.9, 0.8, 0.65, 0.5, 0.35)
# The plan is applied as it is: no scale-down delay and no step limits.
_FREE = msgspec.convert(
    {"max_step_up": 100, "max_step_down": 1, "hold_s": 1e-3, "min_healthy": 0}, ScaleConfig
)


class GpuHourBounds(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours of a trace (core-hours without GPUs); ``None`` where unknown.

    No plan uses less than ``lower_gpu_hours``; its replicas may be fractions held until the last arrival, and
    take at least the least work of the requests. ``achievable_gpu_hours`` are those of a clairvoyant plan of
    whole replicas that met the SLO in the simulator. ``why`` explains missing values.
    """

    lower_gpu_hours: float | None = None
    achievable_gpu_hours: float | None = None
    why: str = ""


def bounds_of(
    deployment: Deployment,
    arrivals: Callable[[], Iterable[Arrival]],
    surveyed: TraceLoad,
    scenario: FaultScenario,
    *,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    trials: Trials = TRIALS,
) -> GpuHourBounds:
    """The bounds of all models together; ``progress`` gets what is tried, in these ``trials``.

    Each mode is measured and planned at several capacity factors, each of which takes several runs.

    The achievable plan keeps to one mode. Raises :class:`policy.errors.TargetError`, with the reason, where
    no plan meets the SLO.
    """
    lower = achievable = 0.0
    for spec in deployment.models:
        if group := gpu_group_of(spec):  # its devices are held whatever is decided
            held_s = group.gpus * surveyed.ends_at
            lower, achievable = lower + held_s, achievable + held_s
        elif load := surveyed.loads.get(spec.name):
            oracle = _Oracle(
                deployment, spec, arrivals, load, surveyed.ends_at, scenario, seed, progress, trials
            )
            modes = oracle.modes()
            achievable += oracle.planned_s(modes)
            lower += oracle.least_s(modes)
    return GpuHourBounds(lower_gpu_hours=lower / HOUR_S, achievable_gpu_hours=achievable / HOUR_S)


class _Mode(NamedTuple):
    """A mode of the offline optimum: the capacity of one replica, and its devices."""

    name: str
    rate: float
    devices: float
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class _Oracle:
    """The offline optimum of one model."""

    deployment: Deployment
    spec: ModelSpec
    arrivals: Callable[[], Iterable[Arrival]]
    load: ModelLoad
    ends_at: float
    scenario: FaultScenario
    seed: int
    progress: Callable[[str], None]
    trials: Trials

    def modes(self) -> list[_Mode]:
        """The modes in which requests meet the SLO at some rate; at least one."""
        found = []
        # Devices are cores where the deployment has no GPUs.
        gpus = any(shape.gpus for spec in self.deployment.models for shape in spec.shapes.values())
        for name, mode in self.spec.modes.items():
            shape, budget = self.spec.shapes[mode.shape], self.deployment.budget
            room = budget.gpus if shape.gpus else budget.cpus
            most = mode.bounds.max
            if room is not None:
                most = min(most, int(room / shape.degree + ROUNDING))
            self.progress(f"{self.spec.name}: what a replica of {name} attains")
            try:
                rate = attained_rate(
                    self.deployment,
                    self.spec,
                    name,
                    arrivals=self._mine,
                    load=self.load,
                    seed=self.seed,
                    trials=self.trials,
                )
            except ValueError:
                continue
            least = min(mode.bounds.min, most)
            found.append(_Mode(name, rate, shape.gpus if gpus else shape.cpus, least, most))
        found = [each for each in found if each.rate > 0 and each.devices]
        if not found:
            raise TargetError(f"{self.spec.name}: requests miss the SLO at any rate, in every mode")
        return found

    def least_s(self, modes: list[_Mode]) -> float:
        """The lower bound in device-seconds: each request costs its least work in the best mode for it."""
        spec, tokens = self.spec, tokens_of(self._mine())
        costs = [
            least_work(shipped(spec, spec.shapes[spec.modes[each.name].shape]), tokens) * each.devices
            for each in modes
        ]
        limits = replace(
            self._problem(modes[0]),
            least=math.floor(min(each.least * each.devices for each in modes)),
            most=math.ceil(max(each.most * each.devices for each in modes)),
        )
        work, until = np.min(costs, axis=0), limits.bins * limits.bin_s
        wait_s, slo = self.deployment.gateway.queue_timeout_s, spec.control.slo
        problem = least_problem(tokens, work, slo, since=0.0, until=until, wait_s=wait_s, shape=limits)
        # A run goes on until all requests that were taken are served.
        served = problem.attainment * float(work.sum())
        return max(served, lower_bound(problem, self.ends_at).replica_s)

    def planned_s(self, modes: list[_Mode]) -> float:
        """Device-seconds of the cheapest plan that meets the SLO in the simulator."""
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
            raise TargetError(f"{self.spec.name}: the SLO is missed even at the maximum replica count")
        return best

    def _held_s(self, mode: _Mode) -> float:
        return min(self._followed_s(mode), self._constant_s(mode))

    def _constant_s(self, mode: _Mode) -> float:
        """Device-seconds of the smallest fleet that meets the SLO without a change: its caches stay warm."""
        limits = self._problem(mode)
        ends_at = limits.bins * limits.bin_s
        low, high = max(1, mode.least), mode.most + 1
        while low < high:
            count = (low + high) // 2
            plan = ReplicaCountPlan(at=(0.0,), counts=(count,), ends_at=ends_at, replica_s=count * ends_at)
            if self._attained(mode.name, plan) >= limits.attainment:
                high = count
            else:
                low = count + 1
        return low * ends_at * mode.devices if low <= mode.most else math.inf

    def _followed_s(self, mode: _Mode) -> float:
        """Device-seconds of the cheapest plan that follows the load."""
        best, limits = math.inf, self._problem(mode)
        least = limits.least * limits.bins * limits.bin_s * mode.devices
        for factor in UPRATES:
            held = self._held_at(mode, factor)
            best = min(best, held)
            if held == math.inf or held <= least:
                break
        if best < math.inf:
            return best
        return next(filter(math.isfinite, (self._held_at(mode, factor) for factor in DERATES)), math.inf)

    def _held_at(self, mode: _Mode, factor: float) -> float:
        """Device-seconds of the plan at ``factor`` times the capacity, infinite where it misses the SLO."""
        problem = self._problem(mode)
        try:
            held = verify(
                replace(problem, mu=factor * problem.mu), lambda plan: self._attained(mode.name, plan)
            )
        except (ValueError, TargetError):
            return math.inf
        return held.plan.replica_s * mode.devices

    def _attained(self, mode: str, plan: ReplicaCountPlan) -> float:
        """The fraction of requests within the SLO when the plan is run."""
        control = msgspec.structs.replace(
            self.spec.control,
            scale=_FREE,
            guard=GuardConfig(),
            mode=msgspec.structs.replace(self.spec.control.mode, sleep="never"),
        )
        modes = {mode: self.spec.modes[mode]}
        only = msgspec.structs.replace(self.spec, modes=modes, mode=mode, control=control)
        alone = msgspec.structs.replace(self.deployment, models=(only,), upstreams=())
        policies = {only.name: ClairvoyantPolicy(plan)}
        record = simulate(alone, policies, self._mine(), scenario=self.scenario, seed=self.seed)
        return float(np.mean(record.requests[only.name].met))

    def _problem(self, mode: _Mode) -> ProvisioningProblem:
        control, scenario = self.spec.control, self.scenario
        default_s = control.assumed_start_s
        starts = [default_s if each is None else each for each in (scenario.cold_s, scenario.cached_s)]
        wait_s = control.slo.ttft_p95_s
        bin_s = math.ceil(max(BIN_S, (self.ends_at + 1) / MOST_BINS))
        demand = np.zeros(int(self.ends_at // bin_s) + 1)
        for second, count in self.load.seconds.items():
            demand[second // bin_s] += count
        return ProvisioningProblem(
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
