"""What waits in the queues of the gateway, by model, and how well waits are predicted."""

from __future__ import annotations

from collections import Counter as Counts

from gateway.telemetry.metric_families import MetricFamilies, publish_counts, publish_total
from policy.types import Priority


class QueueCounters:
    """One model's queue in this worker: counts since they were last published, and the present depth.

    ``predicted``: waits that were predicted; ``wait_error_s``: the sum of their errors by sign.
    """

    def __init__(self) -> None:
        self.depth: dict[Priority, int] = dict.fromkeys(Priority, 0)
        self.size = 0
        self.refused: Counts[str] = Counts()
        self.displaced = 0
        self.predicted = 0
        self.wait_error_s: dict[str, float] = {"long": 0.0, "short": 0.0}

    def count_wait(self, seconds: float, predicted_s: float | None) -> None:
        """Count a wait, and the error of ``predicted_s``, the wait predicted at its arrival."""
        if predicted_s is not None:
            self.predicted += 1
            error = predicted_s - seconds
            self.wait_error_s["long" if error > 0 else "short"] += abs(error)


class QueueMetrics:
    """The metrics of the queues of all models."""

    def __init__(self, declared: MetricFamilies) -> None:
        counter, gauge = declared.counter, declared.gauge
        self._depth = gauge("tidegate_queue_depth")
        self._size = gauge("tidegate_queue_bytes")
        self._refused = counter("tidegate_queue_refused")
        self._displaced = counter("tidegate_queue_displaced")
        self._predicted = counter("tidegate_queue_foreseen")
        self._wait_error = counter("tidegate_queue_foresight_error_seconds")

    def publish(self, model: str, queue: QueueCounters) -> None:
        for priority, depth in queue.depth.items():
            self._depth.labels(model, priority).set(depth)
        self._size.labels(model).set(queue.size)
        publish_counts(self._refused, queue.refused, model)
        publish_total(self._displaced, queue, "displaced", model)
        publish_total(self._predicted, queue, "predicted", model)
        for sign, seconds in queue.wait_error_s.items():
            self._wait_error.labels(model, sign).inc(seconds)
            queue.wait_error_s[sign] = 0.0
