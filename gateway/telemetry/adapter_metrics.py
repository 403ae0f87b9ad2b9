"""Metrics per adapter of the catalog, with a bounded number of label values.

At most :data:`MOST` adapters of a worker are counted by name at a time; a name that leaves the catalog frees
its place. Shared metric files never drop a series, so a worker publishes at most :data:`EVER` names while it
lives. The others of a model share the label :data:`OTHER`: sums over a model stay right.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final

from gateway.telemetry.metric_families import MetricFamilies, TokenCounters, publish_counts
from policy.stats.histogram import HistogramCounter

if TYPE_CHECKING:
    from gateway.request_context import RequestContext

# Those that are asked for first, which are as a rule those that are asked for most.
MOST: Final = 200
# Some 20 series each. A scrape reads all of them on the event loop: 0.1 s for 200 names, 0.6 s for 1000.
EVER: Final = 400
# No adapter can be called so: names begin with a letter or a digit.
OTHER: Final = "_other"
SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class AdapterCounters:
    """The counts of one adapter in this worker since they were last published.

    ``changed``: a call has ended since then, after its tokens were counted.
    """

    def __init__(self) -> None:
        self.requests: Counts[str] = Counts()
        self.tokens = TokenCounters()
        self.ttft = HistogramCounter(SECONDS)
        self.changed = False

    def count(self, call: RequestContext, began: float) -> None:
        """Count a call that began at this instant, whatever its outcome."""
        self.changed = True
        self.requests[call.outcome] += 1
        first_at = call.first_byte_at
        if first_at is not None:
            self.ttft.add(first_at - began)


class AdapterMetrics:
    """The published counters of at most :data:`MOST` adapters, and one per model for all its others."""

    def __init__(self, declared: MetricFamilies) -> None:
        self._names: Collection[tuple[str, str]] = ()
        self._meters: dict[tuple[str, str], AdapterCounters] = {}
        self._others: dict[str, AdapterCounters] = {}
        # What was counted of names that are gone, and not published yet.
        self._leaving: list[tuple[tuple[str, str], AdapterCounters]] = []
        self._ever: set[tuple[str, str]] = set()
        self._requests = declared.counter("tidegate_adapter_requests")
        self._tokens = declared.counter("tidegate_adapter_tokens")
        self._ttft = declared.histogram("tidegate_adapter_ttft_seconds", SECONDS)

    def follow(self, names: Collection[tuple[str, str]]) -> None:
        """Take the models and names of the catalog; names that it dropped free their places."""
        self._names = names
        for key in [key for key in self._meters if key not in names]:
            self._leaving.append((key, self._meters.pop(key)))

    def of(self, model: str, name: str) -> AdapterCounters:
        """The counters of ``name`` on ``model``; those of all others if the catalog has dropped it."""
        key = (model, name)
        meter = self._meters.get(key)
        if meter is not None:
            return meter
        if key in self._names and len(self._meters) < MOST and (key in self._ever or len(self._ever) < EVER):
            self._ever.add(key)
            meter = self._meters[key] = AdapterCounters()
            return meter
        meter = self._others.get(model)
        if meter is None:
            meter = self._others[model] = AdapterCounters()
        return meter

    def publish(self) -> Iterator[None]:
        """Publish one label at a time, of those with news."""
        while self._leaving:
            (model, name), meter = self._leaving[-1]
            self._publish(model, name, meter)
            self._leaving.pop()
            yield
        others = [((model, OTHER), meter) for model, meter in self._others.items()]
        for (model, name), meter in [*self._meters.items(), *others]:
            if self._publish(model, name, meter):
                yield

    def _publish(self, model: str, name: str, meter: AdapterCounters) -> bool:
        """Publish what is new of it; returns whether anything was."""
        if not meter.changed:
            return False
        publish_counts(self._requests, meter.requests, model, name)
        meter.tokens.publish(self._tokens, model, name)
        self._ttft.labels(model, name).merge(meter.ttft)
        meter.changed = False
        return True
