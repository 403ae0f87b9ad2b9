"""The trace of one request: W3C trace context in and out, and its attempts.

Source: https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import re
from time import monotonic
from typing import Final, NamedTuple

from policy.admission.retry_policy import AttemptOutcome
from policy.routing.cost import CostEstimate
from policy.routing.router import PickResult

ID_64: Final = (1 << 64) - 1
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

    def end(self, outcome: AttemptOutcome, sent_at: float, first_byte_at: float | None) -> None:
        """The attempt has ended; ``sent_at`` is that of an earlier attempt if this one was not sent."""
        self.ended_at, self.outcome = monotonic(), outcome
        if sent_at >= self.granted_at:
            self.sent_at, self.first_at = sent_at, first_byte_at


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
        return (self.span_id + 1 + index) & ID_64 or 1

    def header(self) -> bytes:
        """The line of the head that tells the last attempt's replica of its span."""
        span_id = self.attempt_id(len(self.attempts) - 1)
        return b"traceparent: 00-%b-%016x-0%d\r\n" % (self.trace_id, span_id, 1 if self.sampled else 0)

    def response(self, *, failed: bool) -> bytes:
        """The header `traceresponse` of an error: the trace, and whether it is exported."""
        return b"00-%b-%016x-0%d" % (self.trace_id, self.span_id, 1 if self.sampled or failed else 0)
