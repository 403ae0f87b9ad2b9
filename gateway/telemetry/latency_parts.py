"""The parts of latencies: what gateway, queue, network and engine took of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.telemetry.metric_families import MergedHistogram
from policy.stats.histogram import GAPS, SECONDS, HistogramCounter

if TYPE_CHECKING:
    from gateway.request_context import RequestContext

# The bounds are those of the whole.
PART_NAMES = ("gateway", "queue", "network", "engine")


class LatencyParts:
    """The parts of one latency, which add up to it."""

    def __init__(self) -> None:
        self.gateway = HistogramCounter(SECONDS)
        self.queue = HistogramCounter(SECONDS)
        self.network = HistogramCounter(SECONDS)
        self.engine = HistogramCounter(SECONDS)

    def add(self, before_s: float, queued_s: float, network_s: float, upstream_s: float) -> None:
        """Count a request that was sent ``before_s`` after its arrival and took ``upstream_s`` from then."""
        self.gateway.add(max(0.0, before_s - queued_s))
        self.queue.add(queued_s)
        self.network.add(network_s)
        self.engine.add(upstream_s - network_s)

    def publish(self, metric: MergedHistogram, model: str) -> None:
        for part in PART_NAMES:
            metric.labels(model, part).merge(getattr(self, part))


class GapParts:
    """What the parts of the way of a stream's events were on average, one observation a stream."""

    def __init__(self) -> None:
        self.gateway = HistogramCounter(GAPS)
        self.network = HistogramCounter(GAPS)
        self.engine = HistogramCounter(GAPS)

    def add(self, call: RequestContext) -> None:
        """Count a stream of several events whose replica reported the engine's times."""
        gap_s, events = call.mean_gap_s, call.events
        engine_s = min(gap_s, call.engine_span_s / (events - 1))
        self.engine.add(engine_s)
        self.network.add(gap_s - engine_s)
        self.gateway.add(call.handled_s / events)

    def publish(self, metric: MergedHistogram, model: str) -> None:
        for part in ("gateway", "network", "engine"):
            metric.labels(model, part).merge(getattr(self, part))
