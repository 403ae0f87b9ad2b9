"""Which requests are traced, how their spans hang together, and what a worker sends of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from gateway.protocol.paths import ROUTES
from gateway.protocol.usage import TokenUsage
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.traces.request_trace import (
    RequestTrace,
    TracedAttempt,
    TraceParent,
    read_traceparent,
)
from gateway.telemetry.traces.spans import SpanBuilder
from gateway.telemetry.traces.tracer import Tracer
from policy.admission.retry_policy import AttemptOutcome
from policy.config.tracing import Tracing
from policy.engine.prefill_estimate import GENERIC
from policy.routing.cost import Candidate, CandidateCost
from policy.routing.replica_state import ReplicaState
from policy.routing.router import HOME, PickResult
from tests.gateway.telemetry.test_scrape import served
from tests.gateway.worker import Stack, until
from tests.otlp_receiver import OtlpReceiver, receiving

PROMPT = "canary-word"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = f"00-{TRACE}-{SPAN}-01".encode()


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (CLIENT, True),
        (CLIENT[:-1] + b"0", False),
        (b"01" + CLIENT[2:] + b"-later", True),
        (CLIENT + b"-later", None),
        (b"ff" + CLIENT[2:], None),
        (CLIENT.replace(TRACE.encode(), b"0" * 32), None),
        (CLIENT.upper(), None),
        (b"", None),
        (None, None),
    ],
)
def test_a_traceparent_is_read_as_the_standard_says(value: bytes | None, sampled: bool | None) -> None:
    expected = None if sampled is None else TraceParent(TRACE.encode(), SPAN.encode(), sampled)
    assert read_traceparent(value) == expected


def call(trace: RequestTrace | None, outcome: str = "ok", status: int = 200, **more: Any) -> Any:
    """A streamed chat that arrived at 10 s, with its first token at 11 s."""
    given = {
        "route": ROUTES["/v1/chat/completions"], "usage": TokenUsage(30, 10, 5), "streaming": True,
        "headers": {}, "trace": trace, "outcome": outcome, "status": status,
    }  # fmt: skip
    return served(10.0, ttft_s=1.0, **given | more)


def tracing(settings: Tracing) -> Tracer:
    tracer = Tracer(random.Random(7))  # noqa: S311
    tracer.read(settings)
    return tracer


def kept(settings: Tracing, header: bytes | None = None, ended: float = 12.0, **of: Any) -> str:
    """Why a request is exported that began at 10 s."""
    tracer = tracing(settings)
    trace = tracer.begin({} if header is None else {b"traceparent": header})
    tracer.end(call(trace, **of), "m", "", 10.0, ended)
    assert bool(tracer.waiting) == bool(trace.kept)
    return trace.kept


NEVER = Tracing(endpoint="http://c:4318", sample_ratio=0.0)
ALWAYS = Tracing(endpoint="http://c:4318", sample_ratio=1.0)


@pytest.mark.parametrize(
    ("settings", "of", "reason"),
    [
        (ALWAYS, {}, "sampled"),
        (NEVER, {}, ""),
        (NEVER, {"header": CLIENT}, "sampled"),
        (ALWAYS, {"header": CLIENT[:-1] + b"0"}, ""),
        (NEVER, {"outcome": "upstream_failed", "status": 502}, "error"),
        (NEVER, {"outcome": "stream_broken"}, "error"),
        (NEVER, {"outcome": "queue_full", "status": 429}, ""),
        (NEVER, {"outcome": "cancelled", "status": 0}, ""),
        (NEVER, {"ended": 70.0}, "slow"),
        (NEVER, {"ended": 69.9}, ""),
        (NEVER, {"first_byte_at": 20.0, "ended": 21.0}, "slow"),
        (NEVER, {"header": CLIENT[:-1] + b"0", "ended": 70.0}, "slow"),
    ],
)
def test_errors_and_slow_requests_are_traced_beside_the_sampled_ones(
    settings: Tracing, of: dict[str, Any], reason: str
) -> None:
    assert kept(settings, **of) == reason


def test_the_ratio_holds_and_is_bounded_per_second() -> None:
    tracer = tracing(Tracing(endpoint="http://c:4318", sample_ratio=0.25, max_rate=200))
    for i in range(4000):
        tracer.end(call(tracer.begin({})), "m", "", 10.0, 12.0 + i / 4000)
    assert (len(tracer.waiting), tracer.lost > 700) == (200, True)
    tracer.end(call(tracer.begin({b"traceparent": CLIENT})), "m", "", 10.0, 13.1)
    assert len(tracer.waiting) == 201


def test_an_exemplar_names_a_trace_that_is_exported() -> None:
    metrics, tracer = WorkerMetrics(), tracing(NEVER)
    for ended, header in ((12.0, CLIENT), (12.1, CLIENT.replace(b"-01", b"-00"))):
        headers = {b"traceparent": header}
        one = call(tracer.begin(headers), headers=headers)
        tracer.end(one, "m", "", 10.0, ended)
        metrics.model("m").count(one, 10.0, ended)
    metrics.publish()
    shown = metrics.exemplars.all().values()
    assert {(exemplar.metric, exemplar.id) for exemplar in shown} == {
        (f"tidegate_{name}_seconds", TRACE) for name in ("queue_wait", "ttft", "e2e")
    }


def spans(header: bytes | None = CLIENT) -> Sequence[ReadableSpan]:
    """Those of a stream that a second replica served; the first one refused it."""
    tracer = tracing(NEVER)
    headers = {b"tracestate": b"vendor=1", **({} if header is None else {b"traceparent": header})}
    trace = tracer.begin(headers)
    site, terms = ReplicaState(1, None, GENERIC, 8), (0.01, 0.02, 0.0, 0.0, 0.0, 0.0)
    rows = [CandidateCost(Candidate(id=name, key=i), site, terms, 0, 0, 0) for i, name in enumerate("ab")]
    here, there = (row.estimate() for row in rows)
    for at, quote, outcome in (
        (10.1, here, AttemptOutcome.REFUSED),
        (10.2, there, AttemptOutcome.SERVED),
    ):
        decision = PickResult(quote, rows, HOME)
        attempt = TracedAttempt(at, at + 0.01, quote.candidate.id.encode(), None, quote, decision)
        trace.begin(attempt)
        served = outcome is AttemptOutcome.SERVED
        attempt.end(outcome, at + 0.02, 11.0 if served else None)
        attempt.ended_at = 11.5 if served else at + 0.05
    trace.sampled = True
    tracer.end(call(trace, headers=headers), "m", "acme", 10.0, 12.0)
    return SpanBuilder(Resource({})).build(list(tracer.waiting), 1_000_000_000_000)


def test_the_spans_of_a_request_hang_below_the_clients() -> None:
    built = {span.name: span for span in spans()}
    assert list(built) == ["admission", "queue", "route", "chat m", "POST /v1/chat/completions"]
    server = built["POST /v1/chat/completions"]
    assert server.parent is not None and server.context is not None
    assert (f"{server.parent.span_id:016x}", server.kind) == (SPAN, SpanKind.SERVER)
    assert server.parent.trace_state["vendor"] == "1"
    for span in spans():
        assert span.context is not None and span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.name == server.name or span.parent.span_id == server.context.span_id
    assert (server.start_time, server.end_time) == (1_010_000_000_000, 1_012_000_000_000)
    assert [(event.name, event.timestamp) for event in server.events] == [("first_token", 1_011_000_000_000)]
    assert built["admission"].end_time == 1_010_100_000_000


def test_each_attempt_has_its_choice_its_wait_and_its_outcome() -> None:
    built = spans()
    first, second = (span for span in built if span.kind is SpanKind.CLIENT)
    assert (first.status.status_code, second.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert first.attributes is not None and second.attributes is not None
    assert (first.attributes["error.type"], second.attributes["http.request.resend_count"]) == ("refused", 1)
    assert (first.events, [event.name for event in second.events]) == ((), ["first_token"])
    assert first.context is not None and second.context is not None
    assert second.context.span_id == first.context.span_id + 1
    route = [span for span in built if span.name == "route"][1]
    assert route.attributes is not None
    assert route.attributes["tidegate.replica"] == "b"
    assert route.attributes["tidegate.route.reason"] == HOME
    assert route.attributes["tidegate.route.predicted_ttft_s"] == pytest.approx(0.03)
    assert route.attributes["tidegate.route.candidates"] == ("a", "b")


def test_a_request_has_the_attributes_of_the_conventions() -> None:
    server = spans(None)[-1]
    assert server.parent is None and server.attributes is not None
    assert server.attributes.items() >= {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "tidegate", "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 30, "gen_ai.usage.cache_read.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5, "gen_ai.response.time_to_first_chunk": 1.0,
        "http.response.status_code": 200, "http.route": "/v1/chat/completions", "tidegate.tenant": "acme",
        "tidegate.trace.reason": "sampled",
    }.items()  # fmt: skip


def test_a_request_that_got_no_replica_ends_in_the_queue() -> None:
    tracer = tracing(NEVER)
    trace = tracer.begin({})
    trace.asked_at = 10.1
    tracer.end(call(trace, "deadline", 503, first_byte_at=None), "m", "", 10.0, 12.0)
    admission, queue, server = SpanBuilder(Resource({})).build(list(tracer.waiting), 0)
    assert (admission.name, queue.name, queue.end_time) == ("admission", "queue", server.end_time)
    assert queue.attributes == {"error.type": "deadline"}
    assert (server.status.status_code, server.events) == (StatusCode.ERROR, ())


@pytest.mark.process
async def test_a_worker_sends_traces_that_its_replica_continues(stack: Stack) -> None:
    with receiving() as receiver:
        stack.tracing = {"endpoint": receiver.url, "sample_ratio": 0, "slow_ttft_s": None}
        await stack.start_controller()
        await stack.start_worker()
        replica = await stack.serve("r")
        said = {"messages": [{"role": "user", "content": PROMPT}]}
        stack.http.headers["tracestate"] = "vendor=1"
        assert (await stack.chat(**said)).status_code == 200
        stack.http.headers["traceparent"] = CLIENT.decode()
        assert (await stack.chat(**said)).status_code == 200
        del stack.http.headers["traceparent"]
        replica.answer = fail
        failed = await stack.chat(**said)
        assert failed.status_code == 502
        await until(lambda: len(servers(receiver)) == 2, "both are exported")
        served, broken = servers(receiver)
        assert (served.trace_id, served.parent_id) == (TRACE, SPAN)
        assert broken.attributes["tidegate.trace.reason"] == "error"
        assert failed.headers["traceresponse"] == f"00-{broken.trace_id}-{broken.span_id}-01"
        unsampled, sampled, *_ = replica.hits
        assert unsampled.headers["traceparent"].endswith("-00") and "tracestate" not in unsampled.headers
        (upstream,) = (
            span for span in receiver.spans if span.name == "chat alpha" and span.trace_id == TRACE
        )
        assert sampled.headers["traceparent"] == f"00-{TRACE}-{upstream.span_id}-01"
        assert sampled.headers["tracestate"] == "vendor=1"
        assert upstream.parent_id == served.span_id
        assert all(PROMPT.encode() not in body for body in receiver.bodies)
        receiver.status = 400
        await stack.chat(**said)
        stack.workers[0].terminate()
        assert stack.workers[0].stderr is not None
        assert b'"event":"traces_lost","worker":0,"traces":1' in await stack.workers[0].stderr.read()


async def fail(exchange: Any) -> None:
    await exchange.reply(b"not json")


def servers(receiver: OtlpReceiver) -> list[Any]:
    return [span for span in receiver.spans if span.name.startswith("POST")]
