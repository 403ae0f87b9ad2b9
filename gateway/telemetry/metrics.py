"""The gateway's metrics: plain numbers on the hot path, published twice a second.

A labelled increment of a multiprocess metric takes several microseconds. Labels come from closed sets, never
from clients.
"""

from __future__ import annotations

import os
from collections import Counter as Counts
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from math import nan
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Metric

from gateway.http.reserve_descriptor import ReserveDescriptor
from gateway.protocol.errors import NO_ROOM
from gateway.telemetry.adapter_metrics import AdapterMetrics
from gateway.telemetry.exemplars import Example, ExemplarStore
from gateway.telemetry.gen_ai_metrics import OPERATIONS, GenAiCounters, GenAiMetrics
from gateway.telemetry.latency_parts import GapParts, LatencyParts
from gateway.telemetry.metric_families import (
    MetricFamilies,
    TokenCounters,
    edge_of,
    publish_by_replica,
    publish_counts,
    publish_growth,
    publish_total,
)
from gateway.telemetry.metric_files import MetricFiles, read_families
from gateway.telemetry.queue_metrics import QueueCounters, QueueMetrics
from gateway.telemetry.tenant_metrics import NONE, TenantMetrics
from policy.routing.replica_health import HealthCounters
from policy.signals.gateway_worker_counters import WorkerCounters
from policy.stats.histogram import GAPS, SECONDS, HistogramCounter
from policy.types import Priority
from policy.wire.metric_definitions import MetricType
from store.os_process import ProcessUsage

if TYPE_CHECKING:
    from gateway.request_context import RequestContext

# Of tenants and adapters, published in one turn of the event loop: 30 us each, and the first time 200 us.
LABELS: Final = 20
DIRECTORY_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
# Predicted minus actual, in seconds and as a fraction of the actual.
ERRORS = (
    -10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, -0.01, -0.005, -0.002, -0.001,
    0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
PARTS = (0.01, 0.02, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0)

# The counts of :class:`ModelCounters` by attribute, with their metric. Latencies of a stream are counted
# together: two histograms would not say how many met both limits.
_COUNTS: Final = {
    "requests": "tidegate_requests",
    "attempts": "tidegate_replica_attempts",
    "streams": "tidegate_served_streams",
    "ejections": "tidegate_ejections",
    "retries": "tidegate_retries",
    "contradictions": "tidegate_contradicting_answers",
    "cached_tokens": "tidegate_cached_prompt_tokens",
    "cached_tokens_error": "tidegate_cached_prompt_tokens_error",
    "probes": "tidegate_probes",
}
_HISTOGRAMS: Final = {
    "queue_wait": ("tidegate_queue_wait_seconds", SECONDS),
    "ttft": ("tidegate_ttft_seconds", SECONDS),
    "ttft_error": ("tidegate_ttft_prediction_error_seconds", ERRORS),
    "ttft_error_part": ("tidegate_ttft_prediction_error_ratio", PARTS),
    "itl": ("tidegate_itl_seconds", GAPS),
    "e2e": ("tidegate_e2e_seconds", SECONDS),
}
_SLO: Final = {"ttft": "met_ttft", "itl": "met_itl", "both": "met_both"}


class ProcessMetrics:
    """CPU, memory, descriptors and the lag of the event loop of gateway processes.

    Two processes of one name, of which one drains, are added up.
    """

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
        self.breakers: dict[str, float] = {}
        # By replica.
        self.stalls: Counts[str] = Counts()
        self.resets: Counts[str] = Counts()
        self.tokens = TokenCounters()
        self.queue = QueueCounters()
        self.coalesced_calls = self.coalesced_requests = 0
        self.in_flight = 0
        self.replicas_up: float = 0.0
        self.ttft = HistogramCounter(SECONDS)
        self.e2e = HistogramCounter(SECONDS)
        self.queue_wait = HistogramCounter(SECONDS)
        self.itl = HistogramCounter(GAPS)
        self.ttft_error = HistogramCounter(ERRORS)
        self.ttft_error_part = HistogramCounter(PARTS)
        self.ttft_parts = LatencyParts()
        self.e2e_parts = LatencyParts()
        self.itl_parts = GapParts()
        self.gen_ai: dict[str, GenAiCounters] = {}
        self.totals = WorkerCounters()
        self.published: dict[str, int] = {}
        # The first observation in each bucket since they were last published.
        self.queue_wait_examples: dict[int, Example] = {}
        self.ttft_examples: dict[int, Example] = {}
        self.e2e_examples: dict[int, Example] = {}

    def leave(self) -> None:
        """The model is no longer served: it has no replicas, which is not 0 of them as if all were down.

        Shared metric files never drop a series, so that it is NaN in them, and scrapes leave it out.
        """
        self.replicas_up = nan
        self.breakers = dict.fromkeys(self.breakers, nan)

    def arrive(self, prompt_tokens: int, *, probe: bool) -> None:
        """Count a request, and its estimated prompt tokens unless it is a ``probe`` of our own."""
        self.in_flight += 1
        if not probe:
            self.totals.arrive(prompt_tokens)

    def count(self, call: RequestContext, began: float, ended: float) -> None:
        """Count a call that began and ended at these instants, whatever its outcome."""
        self.requests[call.route.path, call.outcome] += 1
        first_at, queued_s = call.first_byte_at, call.queued_s
        request_id, traceparent = call.request_id, call.headers.get(b"traceparent")
        # Where requests are traced, an exemplar names a trace that is exported.
        shown = call.trace is None or call.trace.kept != ""
        if self.model:
            bucket = self.queue_wait.add(queued_s)
            if shown and bucket not in self.queue_wait_examples:
                self.queue_wait_examples[bucket] = queued_s, ended, request_id, traceparent
            self._count_gen_ai(call, began, ended)
        # Answers of a fallback provider, token counts and probes say nothing about the replicas' load.
        own = not call.by_fallback and call.route.runner is not None and not call.probe
        if first_at is not None:
            ttft_s = first_at - began
            bucket = self.ttft.add(ttft_s)
            if shown and bucket not in self.ttft_examples:
                self.ttft_examples[bucket] = ttft_s, ended, request_id, traceparent
            if own:
                self.totals.first_token(ttft_s, call.priority)
        if call.outcome == "ok":
            e2e_s = ended - began
            bucket = self.e2e.add(e2e_s)
            if shown and bucket not in self.e2e_examples:
                self.e2e_examples[bucket] = e2e_s, ended, request_id, traceparent
            sent_at = call.sent_at
            if sent_at > 0.0 and not call.by_fallback:
                before_s, upstream_s = sent_at - began, ended - sent_at
                first_s = upstream_s if first_at is None else first_at - sent_at
                engine_s = call.engine_s
                network_s = (
                    min(call.round_trip_s, first_s) if engine_s < 0.0 else max(0.0, first_s - engine_s)
                )
                self.e2e_parts.add(before_s, queued_s, network_s, upstream_s)
                if first_at is not None:
                    self.ttft_parts.add(before_s, queued_s, network_s, first_s)
                    if call.engine_span_s >= 0.0 and call.events > 1:
                        self.itl_parts.add(call)
            if own:
                self.totals.end(ended - began)
                if (usage := call.usage) is not None:
                    adapter = "" if call.adapter is None else call.adapter.name
                    self.totals.count_tokens(usage.prompt, usage.cached, usage.completion, adapter)
            if first_at is not None:
                self.served_stream(first_at - began, call.mean_gap_s, call.priority, own=own)
        elif call.outcome in NO_ROOM:
            self.totals.refused += 1

    def _count_gen_ai(self, call: RequestContext, began: float, ended: float) -> None:
        operation = OPERATIONS.get(call.route.path)
        if operation is not None and not call.probe:
            counters = self.gen_ai.get(operation)
            if counters is None:
                counters = self.gen_ai[operation] = GenAiCounters()
            counters.count(call, began, ended)

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
        self.streams[edge_of(SECONDS, ttft_s), edge_of(GAPS, mean_gap_s)] += 1
        if own:
            self.totals.judge(ttft_s, mean_gap_s, priority)


class WorkerMetrics:
    """The metrics of one worker, in a registry whose files all workers of a host share."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        directory = os.environ.get(DIRECTORY_VARIABLE)
        self._directory = directory or None
        self._files = MetricFiles(Path(directory), os.getpid()) if directory else None
        if self._files is not None:
            self._files.reserve(models=0)
        self._spare = ReserveDescriptor() if self._files is not None else None
        self.exemplars = ExemplarStore(Path(directory) if directory else None, time() - monotonic())
        declared = MetricFamilies(registry)
        self.adapters = AdapterMetrics(declared)
        self.tenants = TenantMetrics(declared)
        self._gen_ai = GenAiMetrics(declared)
        self._queues = QueueMetrics(declared)
        # Of requests that named no model of the deployment.
        self.no_model = ModelCounters("")
        self._meters: dict[str, ModelCounters] = {}
        counter, gauge = declared.counter, declared.gauge
        self.spillover = counter("tidegate_spillover_attempts")
        self.spillover_cost = counter("tidegate_spillover_cost")
        self.scrape_misses = counter("tidegate_scrape_misses")
        self._tokens = counter("tidegate_tokens")
        self._counts = {name: counter(metric) for name, metric in _COUNTS.items()}
        self._histograms = [
            (name, declared.histogram(metric, buckets)) for name, (metric, buckets) in _HISTOGRAMS.items()
        ]
        self._ttft_parts = declared.histogram("tidegate_ttft_part_seconds", SECONDS)
        self._e2e_parts = declared.histogram("tidegate_e2e_part_seconds", SECONDS)
        self._itl_parts = declared.histogram("tidegate_itl_part_seconds", GAPS)
        self._judged = counter("tidegate_slo_judged")
        self._met = counter("tidegate_slo_met")
        self._coalesced_calls = counter("tidegate_coalesced_calls")
        self._coalesced_requests = counter("tidegate_coalesced_requests")
        self._replica_names: set[str] = set()
        self._stalls = counter("tidegate_replica_stalls")
        self._resets = counter("tidegate_replica_resets")
        self._in_flight = gauge("tidegate_in_flight")
        self._replicas_up = gauge("tidegate_replicas_up", "livemin")
        # By state and not by replica: most replicas fail never, and names outlive them in the shared files.
        self._breakers = gauge("tidegate_breakers", "livemax")
        self._unrecorded = counter("tidegate_usage_unrecorded_requests")
        self._unrecorded_before = 0
        self._processes = ProcessMetrics(declared)

    def model(self, name: str) -> ModelCounters:
        """The meter of a model that the deployment knows."""
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = ModelCounters(name)
        return meter

    def publish(self) -> None:
        """Merge the counts into the shared metrics; what fails is merged the next time.

        Raises :class:`OSError` where their files cannot grow.
        """
        for _ in self.slices():
            pass

    def slices(self) -> Iterator[None]:
        """As :meth:`publish`, with pauses: a slice takes a millisecond. Between two, others may publish too.

        The reserved descriptor is for files that grow.
        """
        merging = self._merge()
        ended = False
        while not ended:
            if self._spare is not None:
                self._spare.give()
            try:
                if self._files is not None:
                    self._files.reserve(len(self._meters))
                ended = next(merging, True)
            finally:
                if self._spare is not None:
                    self._spare.keep()
            if not ended:
                yield

    def _merge(self) -> Iterator[bool]:
        """Merge all, with pauses, in which counts may come; each label is merged within a slice."""
        for number, _ in enumerate(chain(self.adapters.publish(), self.tenants.publish()), 1):
            if not number % LABELS:
                yield False
        # Nothing else of them was measured: rows of zeros would look like a model that is down.
        publish_counts(self._counts["requests"], self.no_model.requests, NONE)
        for model, meter in list(self._meters.items()):
            yield False
            for name, counter in self._counts.items():
                publish_counts(counter, getattr(meter, name), model)
            for name, histogram in self._histograms:
                histogram.labels(model).merge(getattr(meter, name))
            meter.ttft_parts.publish(self._ttft_parts, model)
            meter.e2e_parts.publish(self._e2e_parts, model)
            meter.itl_parts.publish(self._itl_parts, model)
            self._gen_ai.publish(model, meter.gen_ai)
            publish_by_replica(self._stalls, meter.stalls, self._replica_names, model)
            publish_by_replica(self._resets, meter.resets, self._replica_names, model)
            self._merge_slo(model, meter)
            meter.tokens.publish(self._tokens, model)
            publish_total(self._coalesced_calls, meter, "coalesced_calls", model)
            publish_total(self._coalesced_requests, meter, "coalesced_requests", model)
            for state, count in meter.breakers.items():
                self._breakers.labels(model, state).set(count)
            self._in_flight.labels(model).set(meter.in_flight)
            self._replicas_up.labels(model).set(meter.replicas_up)
            self._queues.publish(model, meter.queue)
            for name in ("queue_wait", "ttft", "e2e"):  # after the counts: a bucket with one is not empty
                examples = getattr(meter, f"{name}_examples")
                self.exemplars.take(_HISTOGRAMS[name][0], model, examples)
                examples.clear()

    def _merge_slo(self, model: str, meter: ModelCounters) -> None:
        totals, published = meter.totals, meter.published
        publish_growth(self._judged, published, "judged", totals.judged, model)
        for target, name in _SLO.items():
            publish_growth(self._met, published, name, getattr(totals, name), model, target)

    def count_unrecorded(self, total: int) -> None:
        """Publish how many requests this worker could not record in its usage journal."""
        self._unrecorded.inc(total - self._unrecorded_before)
        self._unrecorded_before = total

    def publish_process(self, process: str, usage: ProcessUsage, lag_s: float) -> None:
        """Publish what this process uses, and how late its event loop was."""
        self._processes.publish(process, usage, lag_s)

    def collect(self, kinds: Collection[str] = tuple(MetricType)) -> Iterable[Metric]:
        """The families of ``kinds`` over all workers, live gauges over those that still run.

        Takes long: in a thread.
        """
        if self._directory is None:
            return self._registry.collect()
        return read_families(Path(self._directory), kinds)
