"""Prometheus metrics of the simulated engine, with vLLM's names, labels and buckets."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.engine.interface import EngineStats

_LABELS = ("model_name", "engine")
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_E2E = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# Name, help text and the field of EngineStats.
_GAUGES = (
    ("num_requests_running", "Number of requests in model execution batches.", "running"),
    ("num_requests_waiting", "Number of requests waiting to be processed.", "waiting"),
    ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "kv_used"),
)


class SimEngineMetrics:
    """One engine's metrics in a registry of their own; durations are wall-clock seconds."""

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._model = model

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, _LABELS, registry=registry).labels(model, "0")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"vllm:{name}", text, _LABELS, registry=registry, buckets=buckets)
            return metric.labels(model, "0")

        self.prompt_tokens = counter("prompt_tokens", "Number of prefill tokens processed.")
        self.generation_tokens = counter("generation_tokens", "Number of generation tokens processed.")
        self.preemptions = counter("num_preemptions", "Cumulative number of preemptions.")
        self.prefix_queries = counter("prefix_cache_queries", "Prefix cache queries, in tokens.")
        self.prefix_hits = counter("prefix_cache_hits", "Prefix cache hits, in tokens.")
        self._success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        self.ttft = histogram("time_to_first_token_seconds", "Time to first token in seconds.", _TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Inter-token latency in seconds.", _ITL)
        self.e2e = histogram("e2e_request_latency_seconds", "End to end latency in seconds.", _E2E)
        self.iteration = histogram("iteration_tokens_total", "Tokens per engine step.", _ITERATION)

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Read the gauges from ``stats`` when they are scraped."""
        for name, text, field in _GAUGES:
            gauge = Gauge(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(self._model, "0")
            gauge.set_function(lambda field=field: getattr(stats(), field))  # type: ignore[misc]

    def success(self, reason: str) -> None:
        """Count a request that ended with ``reason``: stop, length or abort."""
        self._success.labels(self._model, "0", reason).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)
