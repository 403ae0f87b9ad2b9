"""What vLLM tells of each step: the counts that a replica reports, and vLLM's own metrics with less work."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from prometheus_client import Counter, Histogram
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from serve.engine.interface import EngineStats
from serve.engine.step_stats import StepStats


class StepLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM ships no types
    """vLLM's stat logger: keeps the latest counts of the engine's steps.

    ``AsyncLLM`` calls it in every step, so token progress is visible at once, unlike scraped metrics.
    """

    def __init__(
        self, vllm_config: Any, engine_index: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.latest = EngineStats()
        self.took = StepStats()
        self._config = vllm_config
        self._clock = clock

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
        self.took.ended(self._clock(), tokens, held, requests, goes_on=goes_on)
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


class StepMetrics(PrometheusStatLogger):  # type: ignore[misc]  # vLLM ships no types
    """vLLM's stat logger for Prometheus; metrics and values are the same."""

    _counter_cls = SparseCounter
    _histogram_cls = BatchHistogram

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM once a step; either part may be missing."""
        if iteration_stats is None:
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            return
        latencies = iteration_stats.inter_token_latencies_iter
        iteration_stats.inter_token_latencies_iter = ()
        try:
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        finally:
            iteration_stats.inter_token_latencies_iter = latencies  # other loggers may read them
        self.histogram_inter_token_latency[engine_idx].observe_all(latencies)
