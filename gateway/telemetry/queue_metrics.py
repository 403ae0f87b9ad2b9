"""Metrics of the queues: depth, rejections, and the error of predicted waits."""

from __future__ import annotations

from collections import Counter as Counts

from prometheus_client import CollectorRegistry

from gateway.telemetry.prometheus import MetricFamilies
from policy.types import Priority


class QueueCounters:
    """One model's queue in this worker: counts since they were last published, and the present depth.

    ``foreseen`` sums, over those that waited, the seconds by which the prediction was long or short.
    """

    __slots__ = ("depth", "displaced", "foreseen", "refused", "size", "waited")

    def __init__(self) -> None:
        self.depth: dict[Priority, int] = dict.fromkeys(Priority, 0)
        self.size = 0
        self.refused: Counts[str] = Counts()
        self.displaced = 0
        self.waited = 0
        self.foreseen: dict[str, float] = {"long": 0.0, "short": 0.0}

    def waited_for(self, seconds: float, foreseen_s: float | None) -> None:
        """Count a wait, and the error of ``foreseen_s``, the wait predicted at its arrival."""
        if foreseen_s is not None:
            self.waited += 1
            error = foreseen_s - seconds
            self.foreseen["long" if error > 0 else "short"] += abs(error)


class QueueMetrics:
    """The counters of all models and their published form."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._meters: dict[str, QueueCounters] = {}
        declared = MetricFamilies(registry)
        counter, gauge = declared.counter, declared.gauge
        self._depth = gauge("queue_depth", "Requests that wait for a replica.", "model", "priority")
        self._size = gauge("queue_bytes", "Bytes of the requests that wait.", "model")
        self._refused = counter("queue_refused", "Requests that the queue turned away.", "model", "reason")
        self._displaced = counter("queue_displaced", "Waiting requests that made room for others.", "model")
        self._waited = counter(
            "queue_foreseen", "Requests whose wait was predicted and then measured.", "model"
        )
        self._error = counter(
            "queue_foresight_error_seconds", "By how much predicted waits were too long or short.",
            "model", "sign",
        )  # fmt: skip

    def model(self, name: str) -> QueueCounters:
        """The meter of a model of the deployment."""
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = QueueCounters()
        return meter

    def publish(self) -> None:
        """Merge the counts into the shared metrics."""
        for model, meter in self._meters.items():
            for priority, depth in meter.depth.items():
                self._depth.labels(model, priority).set(depth)
            self._size.labels(model).set(meter.size)
            for reason, count in meter.refused.items():
                self._refused.labels(model, reason).inc(count)
            meter.refused.clear()
            self._displaced.labels(model).inc(meter.displaced)
            self._waited.labels(model).inc(meter.waited)
            meter.displaced = meter.waited = 0
            for sign, seconds in meter.foreseen.items():
                self._error.labels(model, sign).inc(seconds)
                meter.foreseen[sign] = 0.0
