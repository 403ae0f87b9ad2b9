"""The gateway's metrics: plain numbers on the hot path, published twice a second.

A labelled increment of a multiprocess metric takes several microseconds. Labels come from closed sets, never
from clients.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left
from collections import Counter as Counts
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest, multiprocess

from gateway.http.reserve_descriptor import ReserveDescriptor
from gateway.protocol.errors import NO_ROOM
from gateway.telemetry.adapter_metrics import AdapterMetrics
from gateway.telemetry.metric_families import MetricFamilies, TokenCounters, publish_counts, publish_total
from gateway.telemetry.tenant_metrics import NONE, TenantMetrics
from policy.routing.replica_health import HealthCounters
from policy.signals.worker_counters import WorkerCounters
from policy.stats.histogram import GAPS, SECONDS, HistogramCounter
from policy.types import Priority

if TYPE_CHECKING:
    from gateway.request_context import Call

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# Predicted minus actual, in seconds and as a fraction of the actual.
ERRORS = (
    -10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, -0.01, -0.005, -0.002, -0.001,
    0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
PARTS = (0.01, 0.02, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0)


# The counts of :class:`ModelCounters` by attribute, with their metric, its help text, and the labels after
# "model". Latencies of a stream are counted together: two histograms would not say how many met both limits.
_COUNTS = (
    ("requests", "requests", "Requests by outcome.", ("route", "outcome")),
    ("attempts", "upstream_attempts", "RetryLoop on replicas.", ("outcome",)),
    (
        "streams", "served_streams", "Served streams by time to the first byte and mean gap.",
        ("ttft_le", "itl_le"),
    ),
    ("ejections", "ejections", "Replicas taken out of rotation, by why.", ("reason",)),
    (
        "retries", "retries", "Requests that could have gone to another replica, by what came of it.",
        ("outcome",),
    ),
    (
        "contradictions", "contradicting_answers",
        "Answers whose token counts contradict their request, by the count; nothing is learned from them.",
        ("count",),
    ),
    (
        "cached_tokens", "cached_prompt_tokens",
        "Prompt tokens that routing predicted to be cached, and those that the engine reported.", ("kind",),
    ),
    (
        "cached_tokens_error", "cached_prompt_tokens_error",
        "By how many tokens a prompt's predicted cached tokens were above or below the reported.", ("sign",),
    ),
    ("probes", "probes", "Probes of replicas that are out of rotation, by how they went.", ("outcome",)),
)  # fmt: skip
_HISTOGRAMS = (
    ("queue_wait", "queue_wait_seconds", "Time in the queue.", SECONDS),
    ("ttft", "ttft_seconds", "Time to the first body byte.", SECONDS),
    (
        "ttft_error", "ttft_prediction_error_seconds",
        "Predicted minus actual time from a replica's request to its first token.", ERRORS,
    ),
    (
        "ttft_error_part", "ttft_prediction_error_ratio",
        "Absolute error of the predicted time to the first token, as a part of the actual.", PARTS,
    ),
    ("itl", "itl_seconds", "Gap between chunks of a stream.", GAPS),
    ("e2e", "e2e_seconds", "Time of a served request.", SECONDS),
)  # fmt: skip


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


class ModelCounters(HealthCounters):
    """The counts of one model in this worker since they were last published; ``totals`` since it started."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self.requests: Counts[tuple[str, str]] = Counts()
        self.attempts: Counts[str] = Counts()
        self.streams: Counts[tuple[str, str]] = Counts()
        self.contradictions: Counts[str] = Counts()
        self.cached_tokens: Counts[str] = Counts()
        self.cached_tokens_error: Counts[str] = Counts()
        self.breakers: Counts[str] = Counts()
        self.tokens = TokenCounters()
        self.queue = QueueCounters()
        self.coalesced_calls = self.coalesced_requests = 0
        self.in_flight = self.replicas_up = 0
        self.ttft = HistogramCounter(SECONDS)
        self.e2e = HistogramCounter(SECONDS)
        self.queue_wait = HistogramCounter(SECONDS)
        self.itl = HistogramCounter(GAPS)
        self.ttft_error = HistogramCounter(ERRORS)
        self.ttft_error_part = HistogramCounter(PARTS)
        self.totals = WorkerCounters()

    def arrive(self, prompt_tokens: int, *, probe: bool) -> None:
        """Count a request, and its estimated prompt tokens unless it is a ``probe`` of our own."""
        self.in_flight += 1
        if not probe:
            self.totals.arrive(prompt_tokens)

    def count(self, call: Call, began: float, ended: float) -> None:
        """Count a call that began and ended at these instants, whatever its outcome."""
        self.requests[call.route.path, call.outcome] += 1
        if self.model:
            self.queue_wait.add(call.queued_s)
        first_at = call.first_byte_at
        # Answers of a fallback provider, token counts and probes say nothing about the replicas' load.
        own = not call.by_fallback and call.route.runner is not None and not call.probe
        if first_at is not None:
            self.ttft.add(first_at - began)
            if own:
                self.totals.first_token(first_at - began, call.priority)
        if call.outcome == "ok":
            self.e2e.add(ended - began)
            if own:
                self.totals.end(ended - began)
                if (usage := call.usage) is not None:
                    self.totals.count_tokens(usage.prompt, usage.cached, usage.completion)
            if first_at is not None:
                self.served_stream(first_at - began, call.mean_gap_s, call.priority, own=own)
        elif call.outcome in NO_ROOM:
            self.totals.refused += 1

    def predicted(self, predicted_s: float, actual_s: float) -> None:
        """Count the error of a predicted time to first token; both in seconds."""
        self.ttft_error.add(predicted_s - actual_s)
        if actual_s > 0.0:
            self.ttft_error_part.add(abs(predicted_s - actual_s) / actual_s)

    def predicted_cached(self, predicted: int, reported: int) -> None:
        """Count the cached tokens of one prompt."""
        if predicted:
            self.cached_tokens["predicted"] += predicted
        if reported:
            self.cached_tokens["reported"] += reported
        if predicted != reported:
            self.cached_tokens_error["above" if predicted > reported else "below"] += abs(
                predicted - reported
            )

    def served_stream(
        self, ttft_s: float, mean_gap_s: float, priority: Priority = Priority.STANDARD, *, own: bool = True
    ) -> None:
        """Count a served stream in the buckets of both of its latencies."""
        self.streams[_edge(SECONDS, ttft_s), _edge(GAPS, mean_gap_s)] += 1
        if own:
            self.totals.judge(ttft_s, mean_gap_s, priority)


def _edge(bounds: tuple[float, ...], value: float) -> str:
    place = bisect_left(bounds, value)
    return str(bounds[place]) if place < len(bounds) else "+Inf"


class Metrics:
    """The metrics of one worker, in a registry whose files all workers of a host share."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._spare = ReserveDescriptor()
        self._scraping = asyncio.Lock()
        declared = MetricFamilies(registry)
        self.adapters = AdapterMetrics(declared)
        self.tenants = TenantMetrics(declared)
        # Of requests that named no model of the deployment.
        self.no_model = ModelCounters("")
        self._meters: dict[str, ModelCounters] = {}
        counter, gauge = declared.counter, declared.gauge
        self.spillover = counter(
            "overflow_attempts", "RetryLoop on upstreams; cost_cap: the money was spent.",
            "model", "upstream", "outcome",
        )  # fmt: skip
        self.spillover_cost = counter("overflow_cost", "Money spent at upstreams.", "upstream")
        self._tokens = counter(
            "tokens", "Tokens of answers; what was cached is a part of the prompt.", "model", "kind"
        )
        self._counts = {
            name: counter(metric, text, "model", *labels) for name, metric, text, labels in _COUNTS
        }
        self._histograms = [
            (name, declared.histogram(metric, text, "model", buckets=buckets))
            for name, metric, text, buckets in _HISTOGRAMS
        ]
        self._coalesced_calls = counter("coalesced_calls", "Calls that several requests shared.", "model")
        self._coalesced_requests = counter(
            "coalesced_requests", "Requests answered out of a shared call.", "model"
        )
        self._in_flight = gauge("in_flight", "Requests in the gateway.", "model")
        self._replicas_up = gauge("replicas_up", "Replicas that traffic may go to.", "model", over="livemin")
        # By state and not by replica: a label that names replicas outlives them in the shared files.
        self._breakers = gauge(
            "breakers", "Replicas by the state of their breaker.", "model", "state", over="livemax"
        )
        self._queue_depth = gauge("queue_depth", "Requests that wait for a replica.", "model", "priority")
        self._queue_size = gauge("queue_bytes", "Bytes of the requests that wait.", "model")
        self._queue_refused = counter(
            "queue_refused", "Requests that the queue turned away.", "model", "reason"
        )
        self._displaced = counter("queue_displaced", "Waiting requests that made room for others.", "model")
        self._predicted = counter(
            "queue_foreseen", "Requests whose wait was predicted and then measured.", "model"
        )
        self._wait_error = counter(
            "queue_foresight_error_seconds", "By how much predicted waits were too long or short.",
            "model", "sign",
        )  # fmt: skip

    def model(self, name: str) -> ModelCounters:
        """The meter of a model that the deployment knows."""
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
        self.adapters.publish()
        self.tenants.publish()
        # Nothing else of them was measured: rows of zeros would look like a model that is down.
        publish_counts(self._counts["requests"], self.no_model.requests, NONE)
        for model, meter in self._meters.items():
            for name, counter in self._counts.items():
                publish_counts(counter, getattr(meter, name), model)
            for name, histogram in self._histograms:
                histogram.labels(model).merge(getattr(meter, name))
            meter.tokens.publish(self._tokens, model)
            publish_total(self._coalesced_calls, meter, "coalesced_calls", model)
            publish_total(self._coalesced_requests, meter, "coalesced_requests", model)
            for state, count in meter.breakers.items():
                self._breakers.labels(model, state).set(count)
            self._in_flight.labels(model).set(meter.in_flight)
            self._replicas_up.labels(model).set(meter.replicas_up)
            self._merge_queue(model, meter.queue)

    def _merge_queue(self, model: str, queue: QueueCounters) -> None:
        for priority, depth in queue.depth.items():
            self._queue_depth.labels(model, priority).set(depth)
        self._queue_size.labels(model).set(queue.size)
        publish_counts(self._queue_refused, queue.refused, model)
        publish_total(self._displaced, queue, "displaced", model)
        publish_total(self._predicted, queue, "predicted", model)
        for sign, seconds in queue.wait_error_s.items():
            self._wait_error.labels(model, sign).inc(seconds)
            queue.wait_error_s[sign] = 0.0

    async def scrape(self) -> bytes:
        """Prometheus text over all workers, live gauges over those that still run.

        It is collected in a thread, one at a time: many workers and names take hundreds of milliseconds.
        """
        async with self._scraping:
            self.publish()
            return await asyncio.to_thread(self._collect)

    def _collect(self) -> bytes:
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
