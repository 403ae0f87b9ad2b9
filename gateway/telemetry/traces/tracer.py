"""The traces of one worker: which requests are sampled, and which that ended are exported.

While a request runs only instants are kept. Spans are made of them (:mod:`gateway.telemetry.traces.spans`)
when it has ended and only if it is exported: that it failed or was slow is known by then.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Final, NamedTuple

from gateway.protocol.usage import TokenUsage
from gateway.request_context import RequestContext
from gateway.telemetry.gen_ai_metrics import OPERATIONS
from gateway.telemetry.traces.request_trace import ID_64, RequestTrace, read_traceparent
from policy.config.tracing import Tracing
from policy.types import Priority

# The traces that wait for a receiver that does not keep up; what comes then is lost, and counted.
MAX_WAITING: Final = 1024
_MAX_TRACESTATE: Final = 512


class EndedRequest(NamedTuple):
    """What is exported of a request: names and numbers, never its text. Instants are
    seconds of ``time.monotonic``.

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
        self._sampled_below = int(settings.sample_ratio * (ID_64 + 1))

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
