"""The trace of one request: W3C trace context in and out, its attempts, and whether it is exported.

While a request runs only instants are kept. Spans are made of them (:mod:`gateway.telemetry.traces.spans`)
when it has ended and only if it is exported: that it failed or was slow is known by then.
Source: https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import random
import re
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from gateway.protocol.usage import TokenUsage
from gateway.telemetry.gen_ai_metrics import OPERATIONS
from policy.admission.retry_policy import AttemptOutcome
from policy.config.tracing import Tracing
from policy.routing.cost import CostEstimate
from policy.routing.router import PickResult
from policy.types import Priority

if TYPE_CHECKING:
    from gateway.request_context import RequestContext

# The traces that wait for a receiver that does not keep up; what comes then is lost, and counted.
MAX_WAITING: Final = 1024
_MAX_TRACESTATE: Final = 512
_ID_64: Final = (1 << 64) - 1
_TRACEPARENT: Final = re.compile(
    rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL
)


class TraceParent(NamedTuple):
    """A `traceparent`: the trace, the span that asks (32 and 16 hex digits), and whether it is recorded."""

    trace_id: bytes
    span_id: bytes
    sampled: bool


def read_traceparent(value: bytes | None) -> TraceParent | None:
    """The content of the header, ``None`` if it is missing or invalid; later versions may be longer."""
    found = _TRACEPARENT.fullmatch(value) if value is not None else None
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5] is not None):
        return None
    trace_id, span_id = found[2], found[3]
    if not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    return TraceParent(trace_id, span_id, bool(int(found[4], 16) & 1))


class TracedAttempt:
    """A wait for a replica and what came of it; instants are seconds of ``time.monotonic``, 0 for never.

    ``expected_wait_s`` was predicted for a request that had to wait. ``first_at`` is the first event of a
    stream.
    """

    __slots__ = (
        "asked_at", "decision", "ended_at", "expected_wait_s", "first_at", "granted_at", "outcome",
        "quote", "replica", "sent_at",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917 - made for each request, in two places
        self,
        asked_at: float,
        granted_at: float,
        replica: bytes,
        expected_wait_s: float | None = None,
        quote: CostEstimate | None = None,
        decision: PickResult | None = None,
    ) -> None:
        self.replica = replica
        self.expected_wait_s = expected_wait_s
        self.quote = quote
        self.decision = decision
        self.asked_at, self.granted_at = asked_at, granted_at
        self.sent_at = self.ended_at = 0.0
        self.first_at: float | None = None
        self.outcome = ""

    def end(self, call: RequestContext, outcome: AttemptOutcome) -> None:
        """The attempt of ``call`` has ended."""
        self.ended_at, self.outcome = monotonic(), outcome
        if call.sent_at >= self.granted_at:
            self.sent_at, self.first_at = call.sent_at, call.first_byte_at


class RequestTrace:
    """The trace of one request. ``trace_id`` and the client's ``parent_id`` are hex digits, empty if none.

    ``span_id`` is that of our span of the request, and the spans of its attempts have the ids that follow it.
    ``sampled`` was decided at its arrival, ``kept`` at its end: why it is exported, empty if it is not.
    ``asked_at``: it waits for a replica since then, 0 if it does not.
    """

    __slots__ = ("asked_at", "attempts", "kept", "parent_id", "sampled", "span_id", "trace_id")

    def __init__(self, trace_id: bytes, parent_id: bytes, span_id: int, sampled: bool) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.span_id = span_id
        self.sampled = sampled
        self.kept = ""
        self.asked_at = 0.0
        self.attempts: list[TracedAttempt] = []

    def begin(self, attempt: TracedAttempt) -> None:
        """It has a replica."""
        self.asked_at = 0.0
        self.attempts.append(attempt)

    def attempt_id(self, index: int) -> int:
        return (self.span_id + 1 + index) & _ID_64 or 1

    def header(self) -> bytes:
        """The line of the head that tells the last attempt's replica of its span."""
        span_id = self.attempt_id(len(self.attempts) - 1)
        return b"traceparent: 00-%b-%016x-0%d\r\n" % (self.trace_id, span_id, 1 if self.sampled else 0)

    def response(self, *, failed: bool) -> bytes:
        """The header `traceresponse` of an error: the trace, and whether it is exported."""
        return b"00-%b-%016x-0%d" % (self.trace_id, self.span_id, 1 if self.sampled or failed else 0)


class EndedRequest(NamedTuple):
    """What is exported of a request: names and numbers, never its text. Instants as in
    :class:`TracedAttempt`.

    ``model``, ``tenant``, ``adapter`` and ``operation`` are empty where there is none, ``status`` is 0.
    """

    trace: RequestTrace
    began_at: float
    ended_at: float
    route: str
    operation: str
    model: str
    adapter: str
    tenant: str
    priority: Priority
    request_id: str
    streaming: bool
    status: int
    outcome: str
    first_at: float | None
    usage: TokenUsage | None
    tracestate: bytes


class Tracer:
    """Begins the traces of one worker's requests, and keeps those to export in ``waiting``.

    ``lost`` counts those that there was no room for.
    """

    def __init__(self, rng: random.Random) -> None:
        self._bits = rng.getrandbits
        # The first half of the ids of traces that begin here; the second is random.
        self._prefix = b"%016x" % (rng.getrandbits(64) or 1)
        self.on = False
        self.settings = Tracing()
        self.waiting: deque[EndedRequest] = deque()
        self.lost = 0
        self._sampled_below = 0
        self._second, self._in_second = 0.0, 0

    def read(self, settings: Tracing) -> None:
        """Apply the deployment's settings."""
        self.settings = settings
        self.on = bool(settings.endpoint)
        self._sampled_below = int(settings.sample_ratio * (_ID_64 + 1))

    def begin(self, headers: dict[bytes, bytes]) -> RequestTrace:
        """The trace of a request with these headers, a part of its client's if that has one."""
        parent = read_traceparent(headers.get(b"traceparent"))
        if parent is not None:
            return RequestTrace(parent.trace_id, parent.span_id, self._bits(64) or 1, parent.sampled)
        headers.pop(b"tracestate", None)
        number = self._bits(64)
        # As OpenTelemetry's TraceIdRatioBased sampler.
        sampled = number < self._sampled_below
        return RequestTrace(b"%b%016x" % (self._prefix, number), b"", self._bits(64) or 1, sampled)

    def end(self, call: RequestContext, model: str, tenant: str, began: float, ended: float) -> None:
        """The call began and ended at these instants: keep its trace, or drop it."""
        trace = call.trace
        if trace is None or not (kept := self._reason(call, trace, began, ended)):
            return
        if ended - self._second >= 1.0:
            self._second, self._in_second = ended, 0
        if self._in_second >= self.settings.max_rate or len(self.waiting) >= MAX_WAITING:
            self.lost += 1
            return
        self._in_second += 1
        trace.kept = kept
        # The exemplars of metrics name this trace.
        call.headers[b"traceparent"] = trace.response(failed=True)
        tracestate = call.headers.get(b"tracestate", b"")
        adapter = call.adapter
        self.waiting.append(
            EndedRequest(
                trace,
                began,
                ended,
                call.route.path,
                OPERATIONS.get(call.route.path, ""),
                model,
                "" if adapter is None else adapter.name,
                tenant,
                call.priority,
                call.request_id.decode(),
                call.streaming,
                call.status,
                call.outcome,
                call.first_byte_at,
                call.usage,
                tracestate if len(tracestate) <= _MAX_TRACESTATE else b"",
            )
        )

    def _reason(self, call: RequestContext, trace: RequestTrace, began: float, ended: float) -> str:
        """Why the trace is exported; empty if it is not."""
        if is_error(call.outcome, call.status):
            return "error"
        slow_s, slow_ttft_s, first_at = self.settings.slow_s, self.settings.slow_ttft_s, call.first_byte_at
        if slow_s is not None and ended - began >= slow_s:
            return "slow"
        if slow_ttft_s is not None and first_at is not None and first_at - began >= slow_ttft_s:
            return "slow"
        return "sampled" if trace.sampled else ""


def is_error(outcome: str, status: int) -> bool:
    """Whether a request failed by an error of ours, not of its client's: its stream broke, or 5xx."""
    return outcome not in ("ok", "cancelled") and not 400 <= status < 500
