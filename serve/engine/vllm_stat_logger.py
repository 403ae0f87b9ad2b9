"""What vLLM tells of each step: the counts that a replica reports, and vLLM's own metrics with less work."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec
from prometheus_client import REGISTRY, Counter, Histogram, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from serve.engine.interface import EngineStats
from serve.engine.step_stats import StepStats

# Steps that are counted together at most: with 256 streams their latencies take 2 ms.
MAX_STEPS: Final = 32


class StepLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM ships no types
    """vLLM's stat logger: keeps the latest counts of the engine's steps.

    ``AsyncLLM`` calls it in every step, so token progress is visible at once, unlike scraped metrics.
    ``clock`` tells when the step that is recorded ended, in seconds.
    """

    def __init__(
        self, vllm_config: Any, engine_index: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.latest = EngineStats()
        self.took = StepStats()
        self._config = vllm_config
        self.clock = clock

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM once a step; either part may be missing."""
        last = self.latest
        preempted = last.preempted + (iteration_stats.num_preempted_reqs if iteration_stats else 0)
        if scheduler_stats is None:
            self.latest = msgspec.structs.replace(last, steps=last.steps + 1, preempted=preempted)
            return
        running, deferred = scheduler_stats.num_running_reqs, scheduler_stats.num_skipped_waiting_reqs
        waiting = scheduler_stats.num_waiting_reqs + deferred
        self.latest = EngineStats(
            running=running,
            waiting=waiting,
            kv_used=scheduler_stats.kv_cache_usage,
            tokens=last.tokens + self._timed(scheduler_stats, last.kv_used, running + waiting > 0),
            steps=last.steps + 1,
            preempted=preempted,
            deferred=deferred,
        )

    def _timed(self, stats: Any, kv_before: float, goes_on: bool) -> int:
        """Record the step time; the tokens scheduled in the step.

        These are not the new tokens: a chunk of a prompt produces none.
        """
        details, stats.iteration_details = stats.iteration_details, None  # or vLLM logs a line of it
        if details is None:
            return 0
        tokens = int(details.num_ctx_tokens + details.num_generation_tokens)
        capacity = self._config.cache_config.kv_cache_size_tokens or 0
        # KV use during the step: finished requests have released theirs by now.
        held = max(kv_before * capacity + tokens, stats.kv_cache_usage * capacity)
        requests = details.num_ctx_requests + details.num_generation_requests
        self.took.ended(self.clock(), tokens, held, requests, goes_on=goes_on)
        return tokens

    def log_engine_initialized(self) -> None:
        """vLLM's hook after start-up; unused."""


class SparseCounter(Counter):
    """A counter that is often told to increase by nothing: most steps compute no prompt."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        if amount:
            super().inc(amount, exemplar)


class BatchHistogram(Histogram):
    """A histogram that takes the values of a step together."""

    def observe_all(self, amounts: Collection[float]) -> None:
        """As :meth:`observe` of each."""
        bounds = self._upper_bounds
        for place, count in Tally([bisect_left(bounds, amount) for amount in amounts]).items():
            self._buckets[place].inc(count)
        self._sum.inc(sum(amounts))


class CollectHook(Collector):
    """A collector without metrics, which calls ``prepare`` when a registry collects."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._prepare = prepare

    def describe(self) -> list[Metric]:
        """Called in place of :meth:`collect` when it is registered."""
        return []

    def collect(self) -> list[Metric]:
        self._prepare()
        return []


class StepMetrics(PrometheusStatLogger):  # type: ignore[misc]  # vLLM ships no types
    """vLLM's stat logger for Prometheus; metrics and values are the same.

    Steps are counted several together, when enough have come or when the metrics are read. Each for itself
    took 109 us, with the processor's caches full of the engine's work.
    """

    _counter_cls = SparseCounter
    _histogram_cls = BatchHistogram

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self._steps: deque[tuple[Any, Any, Any, int]] = deque()
        # The registry asks its collectors in their order, so this one before vLLM's.
        REGISTRY.register(CollectHook(self.count))
        super().__init__(vllm_config, engine_indexes)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM once a step; either part may be missing."""
        # Without this one, which other loggers may not have read yet.
        if len(self._steps) >= MAX_STEPS:
            self.count()
        self._steps.append((scheduler_stats, iteration_stats, mm_cache_stats, engine_idx))

    def count(self) -> None:
        """Count the steps that are not counted yet."""
        latencies: defaultdict[int, list[float]] = defaultdict(list)
        while self._steps:
            scheduler_stats, iteration_stats, mm_cache_stats, engine_idx = self._steps.popleft()
            if iteration_stats is not None:
                latencies[engine_idx] += iteration_stats.inter_token_latencies_iter
                iteration_stats.inter_token_latencies_iter = ()
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        for engine_idx, amounts in latencies.items():
            self.histogram_inter_token_latency[engine_idx].observe_all(amounts)
