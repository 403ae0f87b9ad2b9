"""The gateway's metrics: plain numbers on the hot path, published twice a second.

A labelled increment of a multiprocess metric takes several microseconds. Labels come from closed sets, never
from clients.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter as Counts
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest, multiprocess

from gateway.http.reserve_descriptor import ReserveDescriptor
from gateway.protocol.errors import NO_ROOM
from gateway.protocol.usage import Usage
from gateway.telemetry.adapter_metrics import AdapterMetrics
from gateway.telemetry.metric_families import MetricFamilies
from policy.routing.replica_health import HealthCounters
from policy.signals.model_counters import WorkerCounters
from policy.stats.histogram import HistogramCounter
from policy.types import Priority

if TYPE_CHECKING:
    from gateway.request_context import Call

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (
    0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
GAPS = (
    0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip


# Predicted minus actual, in seconds and as a part of what it was.
ERRORS = (
    -10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, -0.01, -0.005, -0.002, -0.001,
    0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
PARTS = (0.01, 0.02, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0)


class ModelCounters(HealthCounters):
    """The counts of one model in this worker since they were last published; ``totals`` since it started."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self.requests: Counts[tuple[str, str]] = Counts()
        self.attempts: Counts[str] = Counts()
        self.streams: Counts[tuple[str, str]] = Counts()
        self.breakers: Counts[str] = Counts()
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.coalesced_calls = self.coalesced_requests = 0
        self.in_flight = self.replicas_up = 0
        self.ttft = HistogramCounter(SECONDS)
        self.e2e = HistogramCounter(SECONDS)
        self.queue_wait = HistogramCounter(SECONDS)
        self.itl = HistogramCounter(GAPS)
        self.ttft_error = HistogramCounter(ERRORS)
        self.ttft_error_part = HistogramCounter(PARTS)
        self.totals = WorkerCounters()

    def arrive(self) -> None:
        self.in_flight += 1
        self.totals.arrived += 1

    def count(self, call: Call, began: float, ended: float) -> None:
        """Count a call that began and ended at these instants, whatever its outcome."""
        self.requests[call.route.path, call.outcome] += 1
        if self.model:
            self.queue_wait.add(call.queued_s)
        first_at = call.first_byte_at
        # What an upstream served says nothing of replicas, and who only counts tokens is no answer of theirs.
        own = not call.elsewhere and call.route.runner is not None
        if first_at is not None:
            self.ttft.add(first_at - began)
            if own:
                self.totals.ttft.add(first_at - began)
        if call.outcome == "ok":
            self.e2e.add(ended - began)
            if own:
                self.totals.end(ended - began)
                if (usage := call.usage) is not None:
                    self.totals.count_tokens(usage.prompt, usage.cached, usage.completion)
            if first_at is not None:
                self.served_stream(first_at - began, call.mean_gap_s, own)
        elif call.outcome in NO_ROOM:
            self.totals.refused += 1

    def predicted(self, predicted_s: float, actual_s: float) -> None:
        """Count the error of a predicted time to first token; both in seconds."""
        self.ttft_error.add(predicted_s - actual_s)
        if actual_s > 0.0:
            self.ttft_error_part.add(abs(predicted_s - actual_s) / actual_s)

    def count_tokens(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.completion_tokens += usage.completion

    def served_stream(self, ttft_s: float, mean_gap_s: float, own: bool = True) -> None:
        """Count a served stream in the buckets of both of its latencies."""
        self.streams[_edge(SECONDS, ttft_s), _edge(GAPS, mean_gap_s)] += 1
        if own:
            self.totals.judge(ttft_s, mean_gap_s)


def _edge(bounds: tuple[float, ...], value: float) -> str:
    place = bisect_left(bounds, value)
    return str(bounds[place]) if place < len(bounds) else "+Inf"


class QueueCounters:
    """One model's queue in this worker: counts since they were last published, and the present depth.

    ``foreseen`` sums, over those that waited, the seconds by which the prediction was long or short.
    """

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
    def __init__(self, declared: MetricFamilies) -> None:
        self._meters: dict[str, QueueCounters] = {}
        self._depth = declared.gauge("queue_depth", "Requests that wait for a replica.", "model", "priority")
        self._size = declared.gauge("queue_bytes", "Bytes of the requests that wait.", "model")
        self._refused = declared.counter(
            "queue_refused", "Requests that the queue turned away.", "model", "reason"
        )
        self._displaced = declared.counter(
            "queue_displaced", "Waiting requests that made room for others.", "model"
        )
        self._waited = declared.counter(
            "queue_foreseen", "Requests whose wait was predicted and then measured.", "model"
        )
        self._error = declared.counter(
            "queue_foresight_error_seconds", "By how much predicted waits were too long or short.",
            "model", "sign",
        )  # fmt: skip

    def model(self, name: str) -> QueueCounters:
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = QueueCounters()
        return meter

    def publish(self) -> None:
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


class Metrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._spare = ReserveDescriptor()
        declared = MetricFamilies(registry)
        self.queues = QueueMetrics(declared)
        self.adapters = AdapterMetrics(declared)
        self._meters: dict[str, ModelCounters] = {}
        counter, gauge = declared.counter, declared.gauge
        self._requests = counter("requests", "Requests by outcome.", "model", "route", "outcome")
        self._attempts = counter("upstream_attempts", "Attempts on replicas.", "model", "outcome")
        self._coalesced_calls = counter("coalesced_calls", "Calls that several requests shared.", "model")
        self._coalesced_requests = counter(
            "coalesced_requests", "Requests answered out of a shared call.", "model"
        )
        self.overflow = counter(
            "overflow_attempts", "Attempts on upstreams; cost_cap: the money was spent.",
            "model", "upstream", "outcome",
        )  # fmt: skip
        self.overflow_cost = counter("overflow_cost", "Money spent at upstreams.", "upstream")
        self._tokens = counter(
            "tokens", "Tokens of answers; what was cached is a part of the prompt.", "model", "kind"
        )
        # Both latencies of one stream together: two histograms would not say how many met both limits.
        self._streams = counter(
            "served_streams", "Served streams by time to the first byte and mean gap.",
            "model", "ttft_le", "itl_le",
        )  # fmt: skip
        self._in_flight = gauge("in_flight", "Requests in the gateway.", "model")
        self._replicas_up = gauge("replicas_up", "Replicas that traffic may go to.", "model", over="livemin")
        self._ejections = counter("ejections", "Replicas taken out of rotation, by why.", "model", "reason")
        self._retries = counter(
            "retries", "Requests that could have gone to another replica, by what came of it.",
            "model", "outcome",
        )  # fmt: skip
        self._probes = counter(
            "probes", "Probes of replicas that are out of rotation, by how they went.", "model", "outcome"
        )
        # By state and not by replica: a label that names replicas outlives them in the shared files.
        self._breakers = gauge(
            "breakers", "Replicas by the state of their breaker.", "model", "state", over="livemax"
        )
        self._queue_wait = declared.histogram(
            "queue_wait_seconds", "Time in the queue.", "model", buckets=SECONDS
        )
        self._ttft = declared.histogram(
            "ttft_seconds", "Time to the first body byte.", "model", buckets=SECONDS
        )
        self._ttft_error = declared.histogram(
            "ttft_prediction_error_seconds",
            "Predicted minus actual time from a replica's request to its first token.",
            "model",
            buckets=ERRORS,
        )
        self._ttft_error_part = declared.histogram(
            "ttft_prediction_error_ratio",
            "Absolute error of the predicted time to the first token, as a part of the actual.",
            "model",
            buckets=PARTS,
        )
        self._itl = declared.histogram(
            "itl_seconds", "Gap between chunks of a stream.", "model", buckets=GAPS
        )
        self._e2e = declared.histogram("e2e_seconds", "Time of a served request.", "model", buckets=SECONDS)

    def model(self, name: str) -> ModelCounters:
        """The meter of a model that the deployment knows; the empty name collects all others."""
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = ModelCounters(name)
        return meter

    def publish(self) -> None:
        """Merge the counts into the shared metrics; what fails is merged the next time.

        The reserved descriptor is for files that grow.
        """
        self._spare.give()
        try:
            self._merge()
        finally:
            self._spare.keep()

    def _merge(self) -> None:
        self.queues.publish()
        self.adapters.publish()
        for meter in self._meters.values():
            for route, outcome in tuple(meter.requests):
                child = self._requests.labels(meter.model, route, outcome)
                child.inc(meter.requests.pop((route, outcome)))
            self._coalesced_calls.labels(meter.model).inc(meter.coalesced_calls)
            self._coalesced_requests.labels(meter.model).inc(meter.coalesced_requests)
            meter.coalesced_calls = meter.coalesced_requests = 0
            self._tokens.labels(meter.model, "prompt").inc(meter.prompt_tokens)
            self._tokens.labels(meter.model, "cached").inc(meter.cached_tokens)
            self._tokens.labels(meter.model, "completion").inc(meter.completion_tokens)
            meter.prompt_tokens = meter.cached_tokens = meter.completion_tokens = 0
            for edges in tuple(meter.streams):
                self._streams.labels(meter.model, *edges).inc(meter.streams.pop(edges))
            for counts, metric in (
                (meter.attempts, self._attempts),
                (meter.ejections, self._ejections),
                (meter.retries, self._retries),
                (meter.probes, self._probes),
            ):
                for label in tuple(counts):
                    metric.labels(meter.model, label).inc(counts.pop(label))
            for state, count in meter.breakers.items():
                self._breakers.labels(meter.model, state).set(count)
            self._in_flight.labels(meter.model).set(meter.in_flight)
            self._replicas_up.labels(meter.model).set(meter.replicas_up)
            self._ttft.labels(meter.model).merge(meter.ttft)
            self._itl.labels(meter.model).merge(meter.itl)
            self._ttft_error.labels(meter.model).merge(meter.ttft_error)
            self._ttft_error_part.labels(meter.model).merge(meter.ttft_error_part)
            self._e2e.labels(meter.model).merge(meter.e2e)
            self._queue_wait.labels(meter.model).merge(meter.queue_wait)

    def render(self) -> bytes:
        """Prometheus text over all workers, live gauges over those that still run."""
        self.publish()
        directory = os.environ.get(DIRECTORY_VARIABLE)
        if not directory:
            return generate_latest(self._registry)
        for path in Path(directory).glob("gauge_live*_*.db"):
            pid = int(path.stem.rpartition("_")[2])
            if not Path(f"/proc/{pid}").exists():
                multiprocess.mark_process_dead(pid, directory)  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
