"""The controller's samples of :mod:`policy.wire.metric_definitions`, which a gateway asks for at a scrape."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_high

from policy.config.deployment import ResourceBudget
from policy.scaling.budget_resources import summed, total
from policy.signals.aggregator import SignalAggregator
from policy.types import ReplicaPhase
from policy.wire.controller_reports import GpuReport
from policy.wire.metric_definitions import METRICS, Samples
from serve.adapters.controller import AdapterController
from serve.async_waiting import run_in_thread
from serve.autoscaler.autoscaler import Autoscaler
from serve.gpu_metrics import REASONS
from serve.state.desired_state import ModelTarget, ModelTargets
from serve.state.observed_state import ObservedState
from serve.state.reconcile_errors import ModelFailures
from store.os_process import read_usage

PROCESS = "controller"
LAG_EVERY_S = 0.5
LAGS_KEPT = 10


@dataclass(eq=False)
class ControllerMetrics:
    """Collects the samples of one controller; ``now`` is the clock of its heartbeats."""

    targets: ModelTargets
    observed: ObservedState
    failures: ModelFailures
    aggregator: SignalAggregator
    autoscaler: Autoscaler
    adapters: AdapterController
    budget: Callable[[], ResourceBudget]
    now: Callable[[], float]

    def __post_init__(self) -> None:
        self._ticks, self._tick_s = 0, 0.0
        self._lags: deque[float] = deque([0.0], maxlen=LAGS_KEPT)
        self._samples: Samples = {}

    def ticked(self, seconds: float) -> None:
        """Count a turn of the control loop."""
        self._ticks += 1
        self._tick_s += seconds

    async def measure_lag(self) -> None:
        """Measure how late the event loop is, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self._lags.append(clock() - due)

    async def collect(self) -> Samples:
        """All samples now."""
        usage = await run_in_thread(read_usage, "process-usage")
        self._samples = {}
        self._put("process_cpu_seconds", usage.cpu_s, PROCESS)
        self._put("process_resident_memory_bytes", usage.resident_bytes, PROCESS)
        self._put("process_open_fds", usage.open_fds, PROCESS)
        self._put("process_max_fds", usage.max_fds, PROCESS)
        self._put("process_start_time_seconds", usage.started_at, PROCESS)
        self._put("event_loop_lag_seconds", max(self._lags), PROCESS)
        self._put("controller_ticks", self._ticks)
        self._put("controller_tick_seconds", self._tick_s)
        for name in self.targets.names():
            self._model(self.targets.get(name))
        for name in self.failures.models.difference(self.targets.names()):
            self._put("control_failing", True, name)
        self._decisions()
        self._resources()
        self._replicas()
        for name, value, labels in self.adapters.metrics():
            self._samples.setdefault(name, []).append((labels, value))
        return self._samples

    def _put(self, name: str, value: float, *labels: str) -> None:
        metric = METRICS[f"tidegate_{name}"]
        assert len(labels) == len(metric.labels), name
        self._samples.setdefault(metric.name, []).append((labels, float(value)))

    def _model(self, target: ModelTarget) -> None:
        name, control = target.spec.name, target.spec.control
        layer = self.observed.layer(target.key())
        self._put("replicas_target", target.aim.count, name)
        self._put("replicas_min", target.bounds.min, name)
        self._put("replicas_max", target.bounds.max, name)
        for mode in target.spec.modes:
            self._put("mode", mode == target.aim.mode, name, mode)
        self._put("settled", target.settled, name)
        self._put("override", target.override(self.autoscaler.at) is not None, name)
        self._put("start_failures", layer.failures, name)
        self._put("engine_restarts", self.observed.registry.restarts[name], name)
        self._put("control_failing", bool(self.failures.note(name)), name)
        self._put("slo_attainment_ratio", control.slo.attainment, name)
        for target_name, limit_s in (("ttft", control.slo.ttft_p95_s), ("itl", control.slo.itl_p95_s)):
            if limit_s is not None:
                self._put("slo_seconds", limit_s, name, target_name)
        demand = self.aggregator.signals(name, self.now()).demand
        if demand is not None:
            self._put("signals_age_seconds", demand.age_s, name)
            self._put("arrival_rate", demand.arrivals.last_20_s, name)

    def _decisions(self) -> None:
        autoscaler = self.autoscaler
        for name, decision in autoscaler.latest.items():
            self._put("replicas_desired", decision.proposal.count, name)
            self._put("decision_age_seconds", max(0.0, autoscaler.at - decision.at), name)
            for bound, rate in (("expected", decision.proposal.forecast),
                                ("high", decision.proposal.forecast_high)):  # fmt: skip
                if rate is not None:
                    self._put("forecast_rate", rate, name, bound)
            self._put("unserved_rate", decision.short, name)
            self._put("replica_capacity_rate", decision.capability.mu, name, "slo")
            self._put("replica_capacity_rate", decision.capability.mu_max, name, "max")
            self._put("engine_model_error_ratio", decision.capability.error, name)
            self._put("engine_model_version", decision.capability.version, name)
        for labels, count in autoscaler.counts.decisions.items():
            self._put("decisions", count, *labels)
        for name, count in autoscaler.counts.forecasts.items():
            self._put("forecasts", count, name)
        for (name, sign), error in autoscaler.counts.errors.items():
            self._put("forecast_error", error, name, sign)

    def _resources(self) -> None:
        for resource, bound in total(self.budget())._asdict().items():
            if bound < math.inf:
                self._put("budget", bound, resource)
        held = summed(self.observed.footprint(name) for name in self.targets.names())
        self._put("budget_held", held.gpus, "gpus")
        self._put("budget_held", held.cpus, "cpus")
        for start in self.observed.starts.saved():
            usual_s = median_high(start.seconds)
            self._put("start_seconds", usual_s, start.model, start.shape, str(start.path))

    def _replicas(self) -> None:
        registry = self.observed.registry
        replicas = registry.fleet(self.autoscaler.at).replicas
        states = Counter((each.model, each.shape, each.state) for each in replicas)
        # That of a target has zeros while it has no replica: without samples no alert sees what is missing.
        targets = [self.targets.get(name) for name in self.targets.names()]
        wanted = {(target.spec.name, target.aim.shape) for target in targets}
        for model, shape in sorted(wanted.union((each.model, each.shape) for each in replicas)):
            for state in ReplicaPhase:
                if state is not ReplicaPhase.STOPPED:
                    self._put("replicas", states[model, shape, state], model, shape, str(state))
        ages, engines = registry.ages(self.now()), self.aggregator.engines()
        gpus = self.aggregator.gpus(self.now())
        situations = self.autoscaler.decided_on.values()
        slowness = {each.id: each.slowness for seen in situations for each in seen.signals.replicas}
        for replica in replicas:
            load, labels = replica.load, (replica.model, replica.id)
            asleep = replica.state is ReplicaPhase.ASLEEP
            self._put("replica_running", load.running, *labels)
            self._put("replica_waiting", load.waiting, *labels)
            self._put("replica_in_flight", load.in_flight, *labels)
            self._put("replica_bound", load.bound, *labels)
            if not asleep:  # it has no KV cache: averages would hide that those of the others are full
                self._put("replica_kv_used_ratio", load.kv_used, *labels)
            self._put("replica_scheduled_tokens", load.tokens, *labels)
            self._put("replica_adapters", len(replica.adapters), *labels)
            self._put("replica_heartbeat_age_seconds", ages[replica.id], *labels)
            if (engine := engines.get(replica.id)) is not None:
                self._put("replica_deferred", engine.deferred, *labels)
                self._put("replica_preempted", engine.preempted, *labels)
            if replica.id in slowness:
                self._put("replica_slowness_ratio", slowness[replica.id], *labels)
            if replica.id in gpus:
                self._gpus(gpus[replica.id], labels, lent=asleep)

        for key, joules in self.aggregator.energy.joules.items():
            self._put("energy_joules", joules, *key)
            self._put("energy_tokens", self.aggregator.energy.tokens[key], *key)

    def _gpus(self, gpus: GpuReport, labels: tuple[str, str], *, lent: bool) -> None:
        """The report on GPUs; what those take that are ``lent`` to another replica counts for that one."""
        if not lent:
            self._put("replica_power_watts", gpus.watts, *labels)
            self._put("replica_energy_joules", gpus.joules, *labels)
        self._put("replica_temperature_celsius", gpus.celsius, *labels)
        self._put("replica_xid", gpus.xid, *labels)
        for bit, reason in REASONS.items():
            self._put("replica_throttled", bool(gpus.reasons & bit), *labels, reason)
        self._put("replica_gpu_clock_hertz", 1e6 * gpus.clock_mhz, *labels)
        self._put("replica_gpu_max_clock_hertz", 1e6 * gpus.clock_max_mhz, *labels)
        self._put("replica_gpu_memory_used_bytes", gpus.memory_used, *labels)
        self._put("replica_gpu_memory_bytes", gpus.memory_total, *labels)
        self._put("replica_gpu_ecc_errors", gpus.ecc_corrected, *labels, "corrected")
        self._put("replica_gpu_ecc_errors", gpus.ecc_uncorrected, *labels, "uncorrected")
        self._put("replica_gpu_link_bytes", gpus.pcie_tx, *labels, "pcie", "tx")
        self._put("replica_gpu_link_bytes", gpus.pcie_rx, *labels, "pcie", "rx")
        self._put("replica_gpu_link_bytes", gpus.nvlink_tx, *labels, "nvlink", "tx")
        self._put("replica_gpu_link_bytes", gpus.nvlink_rx, *labels, "nvlink", "rx")
        self._put("replica_gpu_link_errors", gpus.pcie_replays, *labels, "pcie")
        self._put("replica_gpu_link_errors", gpus.nvlink_errors, *labels, "nvlink")
