"""What is measured of each adapter: by its name, which the catalog gives and no client can make up."""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from gateway.declared import Declared
from gateway.tally import MergedHistogram, Tally
from gateway.usage import Usage

if TYPE_CHECKING:
    from gateway.call import Call

# So many adapters of a worker have numbers of their own: those that are asked for first, which are as a rule
# those that are asked for most. All others of a model share one label.
MOST = 200
OTHER = "other"
SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class AdapterMeter:
    """The numbers of one adapter in this worker since they were last published."""

    __slots__ = ("cached_tokens", "completion_tokens", "news", "prompt_tokens", "requests", "ttft")

    def __init__(self) -> None:
        self.requests: Counts[str] = Counts()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.ttft = Tally(SECONDS)
        self.news = False

    def count(self, call: Call, began: float) -> None:
        """Count a call that began at this instant, whatever became of it."""
        self.news = True
        self.requests[call.outcome] += 1
        first_at = call.first_byte_at
        if first_at is not None:
            self.ttft.add(first_at - began)

    def count_tokens(self, usage: Usage) -> None:
        """Count what an answer cost."""
        self.news = True
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.completion_tokens += usage.completion


class AdapterMetrics:
    """The meters of at most :data:`MOST` adapters, with one for all others of each model, as published."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._meters: dict[tuple[str, str], AdapterMeter] = {}
        declared = Declared(registry)
        self._requests = declared.counter(
            "adapter_requests", "Requests for an adapter by outcome.", "model", "adapter", "outcome"
        )
        self._tokens = declared.counter(
            "adapter_tokens", "Tokens of answers of an adapter; what was cached is a part of the prompt.",
            "model", "adapter", "kind",
        )  # fmt: skip
        self._ttft = MergedHistogram(
            "tidegate_adapter_ttft_seconds",
            "Time to the first body byte of an adapter's streams.",
            ("model", "adapter"),
            buckets=SECONDS,
            registry=registry,
        )

    def of(self, model: str, name: str) -> AdapterMeter:
        """The meter of the catalog's adapter ``name`` on ``model``."""
        meter = self._meters.get((model, name))
        if meter is None:
            key = (model, name if len(self._meters) < MOST else OTHER)
            meter = self._meters.get(key)
            if meter is None:
                meter = self._meters[key] = AdapterMeter()
        return meter

    def publish(self) -> None:
        """Merge what was counted into the shared metrics."""
        for (model, name), meter in self._meters.items():
            if not meter.news:
                continue
            for outcome in tuple(meter.requests):
                self._requests.labels(model, name, outcome).inc(meter.requests.pop(outcome))
            self._tokens.labels(model, name, "prompt").inc(meter.prompt_tokens)
            self._tokens.labels(model, name, "cached").inc(meter.cached_tokens)
            self._tokens.labels(model, name, "completion").inc(meter.completion_tokens)
            meter.prompt_tokens = meter.cached_tokens = meter.completion_tokens = 0
            self._ttft.labels(model, name).merge(meter.ttft)
            meter.news = False
