"""Results of a replay: one row per request, which `tidegate calibrate --check` reads, and their summary."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping

import msgspec
import numpy as np


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, sent ``at`` seconds after the start and ``late_s`` after its instant in the trace.

    Tokens are those that the endpoint counted, or else those that were requested. Latencies are in seconds
    from sending: ``ttft_s`` to the first event, ``e2e_s`` to the last byte; ``itl_s`` is the mean per token
    after the first. They are ``None`` without such an event. ``status`` is that of HTTP, 0 without an answer;
    ``error`` is empty for a complete answer.
    """

    at: float
    late_s: float
    status: int
    error: str = ""
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    model: str = ""
    adapter: str = ""
    blocks: tuple[int, ...] = ()

    @property
    def served(self) -> bool:
        """Whether the answer was complete."""
        return self.status == 200 and not self.error


# Later than the millisecond ticks of the event loop explain.
LATE_S = 0.01
# With a larger fraction of late requests the load differs from the trace.
LATE_PART = 0.01
_QUANTILES = (0.5, 0.9, 0.95, 0.99)


class LatencyDistribution(msgspec.Struct, frozen=True):
    """The distribution of a latency, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """A replay. ``failed`` counts requests by HTTP status: 0 without an answer, 200 for an incomplete one.

    ``cut`` requests were open when the replay was stopped; ``sent`` excludes them. Tokens are those of served
    requests. ``kept_pace`` says whether few enough requests were sent late.
    """

    sent: int
    served: int
    failed: Mapping[int, int]
    cut: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: LatencyDistribution | None
    itl_s: LatencyDistribution | None
    e2e_s: LatencyDistribution | None
    late_s: LatencyDistribution | None
    late: int
    kept_pace: bool
    error: str


class ReplayStatistics:
    def __init__(self) -> None:
        self.sent = 0
        self._served = self._input = self._output = self._late = 0
        self._failed: Counter[int] = Counter()
        self._error = ""
        self._seconds: dict[str, array[float]] = {
            name: array("d") for name in ("ttft_s", "itl_s", "e2e_s", "late_s")
        }

    def add(self, row: ReplayRow) -> None:
        self.sent += 1
        self._late += row.late_s > LATE_S
        if row.served:
            self._served += 1
            self._input += row.input_tokens
            self._output += row.output_tokens
        else:
            self._failed[row.status] += 1
            self._error = self._error or row.error
        for name, values in self._seconds.items():
            value_s = getattr(row, name)
            if value_s is not None and (row.served or name == "late_s"):
                values.append(value_s)

    def outcome(self, *, cut: int, duration_s: float) -> RequestResult:
        return RequestResult(
            sent=self.sent,
            served=self._served,
            failed=dict(self._failed),
            cut=cut,
            duration_s=duration_s,
            input_tokens=self._input,
            output_tokens=self._output,
            late=self._late,
            kept_pace=self._late <= LATE_PART * self.sent,
            error=self._error,
            **{name: _distribution(values) for name, values in self._seconds.items()},
        )


def _distribution(seconds: array[float]) -> LatencyDistribution | None:
    if not seconds:
        return None
    values = np.frombuffer(seconds)
    p50, p90, p95, p99 = (float(cut) for cut in np.quantile(values, _QUANTILES))
    return LatencyDistribution(float(values.mean()), p50, p90, p95, p99, float(values.max()))
