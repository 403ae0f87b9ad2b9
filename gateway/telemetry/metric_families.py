"""Prometheus metric families of one registry, and a histogram that takes counts in bulk."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from policy.stats.histogram import HistogramCounter


class MetricFamilies:
    """Declares metrics named ``tidegate_NAME`` in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A counter, summed over all workers."""
        return Counter(f"tidegate_{name}", text, labels, registry=self._registry)

    def gauge(
        self, name: str, text: str, *labels: str, over: Literal["livesum", "livemin", "livemax"] = "livesum"
    ) -> Gauge:
        """A gauge; ``over`` is how the live workers' values are combined."""
        return Gauge(f"tidegate_{name}", text, labels, registry=self._registry, multiprocess_mode=over)

    def histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> MergedHistogram:
        return MergedHistogram(f"tidegate_{name}", text, labels, buckets=buckets, registry=self._registry)


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
