"""Metrics of gateway processes: CPU, memory, descriptors, and the lag of their event loops."""

from __future__ import annotations

from gateway.telemetry.metric_families import MetricFamilies
from store.os_process import ProcessUsage


class ProcessMetrics:
    """The published metrics; two processes of one name, of which one drains, are added up."""

    def __init__(self, declared: MetricFamilies) -> None:
        self._cpu = declared.counter("tidegate_process_cpu_seconds")
        self._memory = declared.gauge("tidegate_process_resident_memory_bytes")
        self._fds = declared.gauge("tidegate_process_open_fds")
        self._max_fds = declared.gauge("tidegate_process_max_fds", "livemin")
        self._start = declared.gauge("tidegate_process_start_time_seconds", "livemax")
        self._lag = declared.gauge("tidegate_event_loop_lag_seconds", "livemax")
        self._cpu_s = 0.0

    def publish(self, process: str, usage: ProcessUsage, lag_s: float) -> None:
        self._cpu.labels(process).inc(max(0.0, usage.cpu_s - self._cpu_s))
        self._cpu_s = usage.cpu_s
        self._memory.labels(process).set(usage.resident_bytes)
        self._fds.labels(process).set(usage.open_fds)
        self._max_fds.labels(process).set(usage.max_fds)
        self._start.labels(process).set(usage.started_at)
        self._lag.labels(process).set(lag_s)
