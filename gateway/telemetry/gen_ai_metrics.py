"""Metrics by the semantic conventions of OpenTelemetry for generative AI, in Prometheus' spelling.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/ has the names and the limits of buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.protocol.paths import ROUTES
from gateway.telemetry.metric_families import MetricFamilies
from policy.stats.histogram import HistogramCounter

if TYPE_CHECKING:
    from gateway.request_context import RequestContext

PROVIDER: Final = "tidegate"
DURATION = tuple(0.01 * 2.0**i for i in range(14))
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = tuple(4.0**i for i in range(14))
# Their names for what routes do; engines only tokenize for the routes that have no runner.
_OPERATIONS: Final = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/v1/rerank": "rerank",
}
OPERATIONS: Final = {path: _OPERATIONS.get(path, "chat") for path, route in ROUTES.items() if route.runner}


class GenAiCounters:
    """One operation on one model in this worker since it was last published."""

    def __init__(self) -> None:
        self.durations: dict[str, HistogramCounter] = {}
        self.ttft = HistogramCounter(TTFT)
        self.per_token = HistogramCounter(PER_TOKEN)
        self.input = HistogramCounter(TOKENS)
        self.output = HistogramCounter(TOKENS)

    def count(self, call: RequestContext, began: float, ended: float) -> None:
        """Count a call that began and ended at these instants, whatever its outcome."""
        error = "" if call.outcome == "ok" else call.outcome
        duration = self.durations.get(error)
        if duration is None:
            duration = self.durations[error] = HistogramCounter(DURATION)
        duration.add(ended - began)
        if error:
            return
        usage, first_at = call.usage, call.first_byte_at
        if first_at is not None:
            self.ttft.add(first_at - began)
        if usage is not None and usage.exact:
            self.input.add(usage.prompt)
            self.output.add(usage.completion)
            if first_at is not None and usage.completion > 1:
                self.per_token.add((call.last_event_at - first_at) / (usage.completion - 1))


class GenAiMetrics:
    """The published histograms."""

    def __init__(self, declared: MetricFamilies) -> None:
        self._duration = declared.histogram("gen_ai_server_request_duration_seconds", DURATION)
        self._ttft = declared.histogram("gen_ai_server_time_to_first_token_seconds", TTFT)
        self._per_token = declared.histogram("gen_ai_server_time_per_output_token_seconds", PER_TOKEN)
        self._tokens = declared.histogram("gen_ai_client_token_usage", TOKENS)

    def publish(self, model: str, counted: dict[str, GenAiCounters]) -> None:
        """Merge the counts of one model by operation."""
        for operation, counters in counted.items():
            labels = operation, PROVIDER, model
            for error, duration in counters.durations.items():
                self._duration.labels(*labels, error).merge(duration)
            self._ttft.labels(*labels).merge(counters.ttft)
            self._per_token.labels(*labels).merge(counters.per_token)
            self._tokens.labels(*labels, "input").merge(counters.input)
            self._tokens.labels(*labels, "output").merge(counters.output)
