"""The spans of requests that have ended.

Attributes have the names of OpenTelemetry's semantic conventions for HTTP and generative AI, and
``tidegate.*`` where those have none (https://opentelemetry.io/docs/specs/semconv/gen-ai/).
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from gateway.telemetry.gen_ai_metrics import PROVIDER
from gateway.telemetry.traces.request_trace import TracedAttempt
from gateway.telemetry.traces.tracer import EndedRequest, is_error
from policy.admission.retry_policy import AttemptOutcome

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NS = 1_000_000_000

Attributes = dict[str, AttributeValue]


class _Ids(RandomIdGenerator):
    """The trace's id, and random ids of spans, except of those that other processes know: ``span_id``."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        given, self.span_id = self.span_id, 0
        return given or super().generate_span_id()


class _Batch(SpanProcessor):
    """Collects the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanBuilder:
    """Makes the spans of requests: one of each, and below it those of admission and of its attempts."""

    def __init__(self, resource: Resource) -> None:
        self._ids, self._batch = _Ids(), _Batch()
        # The requests are sampled already.
        provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self._batch)
        self._tracer = provider.get_tracer("tidegate.gateway")
        self._epoch_ns = 0

    def build(self, requests: Sequence[EndedRequest], epoch_ns: int) -> list[ReadableSpan]:
        """The spans of ``requests``; ``epoch_ns`` is the Unix time at 0 of their clock, in ns."""
        self._epoch_ns = epoch_ns
        for request in requests:
            self._request(request)
        spans, self._batch.spans = self._batch.spans, []
        return spans

    def _request(self, request: EndedRequest) -> None:
        trace = request.trace
        parent = None
        if trace.parent_id:
            state = TraceState.from_header([request.tracestate.decode("ascii", "replace")])
            ids = int(trace.trace_id, 16), int(trace.parent_id, 16)
            parent = NonRecordingSpan(
                SpanContext(*ids, is_remote=True, trace_flags=_SAMPLED, trace_state=state)
            )
        self._ids.trace_id, self._ids.span_id = int(trace.trace_id, 16), trace.span_id
        about, name = _described(request), f"POST {request.route}"
        server = self._start(parent, name, request.began_at, about, SpanKind.SERVER)
        if request.first_at is not None:
            server.add_event("first_token", timestamp=self._at(request.first_at))
        if asked_at := trace.attempts[0].asked_at if trace.attempts else trace.asked_at:
            self._start(server, "admission", request.began_at, {}).end(self._at(asked_at))
        for i, attempt in enumerate(trace.attempts):
            self._attempt(server, request, attempt, i)
        if trace.asked_at:
            left = {} if request.outcome == "cancelled" else {"error.type": request.outcome}
            self._start(server, "queue", trace.asked_at, {**left}).end(self._at(request.ended_at))
        if is_error(request.outcome, request.status):
            server.set_status(Status(StatusCode.ERROR, request.outcome))
        server.end(self._at(request.ended_at))

    def _attempt(self, server: Span, request: EndedRequest, attempt: TracedAttempt, index: int) -> None:
        waited: Attributes = {}
        if attempt.expected_wait_s is not None and not index:
            waited["tidegate.queue.expected_wait_s"] = attempt.expected_wait_s
        self._start(server, "queue", attempt.asked_at, waited).end(self._at(attempt.granted_at))
        ended_at = attempt.ended_at or request.ended_at
        route = self._start(server, "route", attempt.granted_at, _choice(attempt))
        if not attempt.sent_at:
            route.set_status(Status(StatusCode.ERROR, attempt.outcome))
        route.end(self._at(attempt.sent_at or ended_at))
        if not attempt.sent_at:
            return
        name = f"{request.operation or request.route} {request.model}"
        about: Attributes = {
            **_gen_ai(request), "tidegate.replica": attempt.replica.decode(),
            "tidegate.attempt.outcome": attempt.outcome,
        }  # fmt: skip
        if index:
            about["http.request.resend_count"] = index
        self._ids.span_id = request.trace.attempt_id(index)
        upstream = self._start(server, name, attempt.sent_at, about, SpanKind.CLIENT)
        if attempt.first_at is not None:
            upstream.add_event("first_token", timestamp=self._at(attempt.first_at))
        if attempt.outcome not in (AttemptOutcome.SERVED, AttemptOutcome.LEFT):
            upstream.set_attribute("error.type", attempt.outcome)
            upstream.set_status(Status(StatusCode.ERROR, attempt.outcome))
        upstream.end(self._at(ended_at))

    def _start(
        self,
        parent: Span | None,
        name: str,
        at: float,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        context = set_span_in_context(parent if parent is not None else NonRecordingSpan(_NONE))
        return self._tracer.start_span(name, context, kind, attributes, start_time=self._at(at))

    def _at(self, instant: float) -> int:
        return self._epoch_ns + int(instant * _NS)


_NONE = SpanContext(0, 0, is_remote=False)


def _gen_ai(request: EndedRequest) -> Attributes:
    found: Attributes = {}
    if request.operation:
        found |= {"gen_ai.operation.name": request.operation, "gen_ai.provider.name": PROVIDER}
    if request.model:
        found["gen_ai.request.model"] = request.model
    return found


def _described(request: EndedRequest) -> Attributes:
    """The attributes of the span of the whole request."""
    found: Attributes = {
        "http.request.method": "POST",
        "http.route": request.route,
        **_gen_ai(request),
        "gen_ai.request.stream": request.streaming,
        "tidegate.request_id": request.request_id,
        "tidegate.outcome": request.outcome,
        "tidegate.priority": request.priority,
        "tidegate.trace.reason": request.trace.kept,
    }
    given: dict[str, str | int] = {
        "http.response.status_code": request.status,
        "tidegate.tenant": request.tenant,
        "tidegate.adapter": request.adapter,
        "error.type": request.outcome if request.outcome not in ("ok", "cancelled") else "",
    }
    found |= {name: value for name, value in given.items() if value}
    if (usage := request.usage) is not None and usage.exact:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.cache_read.input_tokens": usage.cached,
            "gen_ai.usage.output_tokens": usage.completion,
        }
    if request.first_at is not None:
        found["gen_ai.response.time_to_first_chunk"] = request.first_at - request.began_at
    return found


def _choice(attempt: TracedAttempt) -> Attributes:
    """The router's decision: the replica, the reason, and what was predicted for all candidates."""
    found: Attributes = {"tidegate.replica": attempt.replica.decode()}
    if (quote := attempt.quote) is not None:
        found |= {
            "tidegate.route.predicted_ttft_s": quote.total,
            "tidegate.route.predicted_wait_s": quote.wait,
            "tidegate.route.predicted_prefill_s": quote.prefill,
            "tidegate.route.predicted_adapter_load_s": quote.adapter,
            "tidegate.route.cached_tokens": quote.cached,
            "tidegate.route.uncached_tokens": quote.uncached,
        }
    if (decision := attempt.decision) is not None:
        quotes = decision.quotes
        found |= {
            "tidegate.route.reason": decision.reason,
            "tidegate.route.candidates": [each.candidate.id for each in quotes],
            "tidegate.route.candidates.predicted_ttft_s": [each.total for each in quotes],
        }
    return found
