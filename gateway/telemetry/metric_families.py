"""Prometheus metric families of one registry, and counts that are published into them in bulk."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Sequence
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.protocol.usage import TokenUsage
from policy.stats.histogram import HistogramCounter
from policy.wire.metric_definitions import METRICS

# Replicas with a name of their own while a worker lives, as shared metric files never drop a series.
MOST_REPLICAS: Final = 500
OTHER_REPLICAS: Final = "_other"


class MetricFamilies:
    """Declares metrics of :data:`policy.wire.metric_definitions.METRICS` in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str) -> Counter:
        """A counter, summed over all workers."""
        metric = METRICS[name]
        return Counter(name, metric.text, metric.labels, registry=self._registry)

    def gauge(self, name: str, over: Literal["livesum", "livemin", "livemax"] = "livesum") -> Gauge:
        """A gauge; ``over`` is how the live workers' values are combined."""
        metric = METRICS[name]
        return Gauge(name, metric.text, metric.labels, registry=self._registry, multiprocess_mode=over)

    def histogram(self, name: str, buckets: tuple[float, ...]) -> MergedHistogram:
        metric = METRICS[name]
        return MergedHistogram(name, metric.text, metric.labels, buckets=buckets, registry=self._registry)


class MergedHistogram(Histogram):
    """A histogram that takes the counts of many observations at once."""

    def merge(self, tally: HistogramCounter) -> None:
        for i, count in enumerate(tally.counts):
            if count:
                self._buckets[i].inc(count)
                tally.counts[i] = 0
        if tally.total:
            self._sum.inc(tally.total)
            tally.total = 0.0


def edge_of(bounds: Sequence[float], value: float) -> str:
    """The label of the bucket of ``value`` in a histogram with these upper ``bounds``."""
    place = bisect_left(bounds, value)
    return str(bounds[place]) if place < len(bounds) else "+Inf"


class TokenCounters:
    """Tokens of answers since they were last published; cached ones are a part of the prompt."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.completion = 0

    def count(self, usage: TokenUsage) -> None:
        self.prompt += usage.prompt
        self.cached += usage.cached
        self.completion += usage.completion

    def publish(self, metric: Counter, *labels: str) -> None:
        for kind in ("prompt", "cached", "completion"):
            publish_total(metric, self, kind, *labels, kind)


def publish_counts(metric: Counter, counts: Counts[Any], *labels: str) -> None:
    """Move ``counts`` into ``metric``; their keys are the values of the labels that follow ``labels``."""
    for key in tuple(counts):
        values = (key,) if isinstance(key, str) else key
        metric.labels(*labels, *values).inc(counts.pop(key))


def publish_by_replica(metric: Counter, counts: Counts[str], names: set[str], model: str) -> None:
    """Move ``counts`` by replica into ``metric``; the first :data:`MOST_REPLICAS` have their ``names``."""
    for replica in tuple(counts):
        if len(names) < MOST_REPLICAS:
            names.add(replica)
        label = replica if replica in names else OTHER_REPLICAS
        metric.labels(model, label).inc(counts.pop(replica))


def publish_total(metric: Counter, counters: object, name: str, *labels: str) -> None:
    """Move the attribute ``name`` of ``counters`` into ``metric``."""
    metric.labels(*labels).inc(getattr(counters, name))
    setattr(counters, name, 0)


def publish_growth(metric: Counter, published: dict[str, int], name: str, total: int, *labels: str) -> None:
    """Raise ``metric`` to ``total``; ``published`` has by ``name`` what it was raised to before."""
    metric.labels(*labels).inc(total - published.get(name, 0))
    published[name] = total
