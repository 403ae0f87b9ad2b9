"""What a replay records of each request: a line of JSON, which `tidegate calibrate --check` reads.

What came of a replay: how many were served, how soon, and whether the client itself kept pace."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping

import msgspec
import numpy as np


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as it went.

    ``at`` is when it was sent, in seconds since the replay began: ``late_s`` after its instant in the trace.
    ``input_tokens``, ``cached_tokens`` of them and ``output_tokens`` are as the endpoint counted them,
    or what was asked for where it did not. Latencies are in seconds from when it was sent: ``ttft_s`` to the
    first event, ``itl_s`` from there to the last token by the tokens after the first, ``e2e_s`` to the last
    byte; ``None`` where there was no such event. ``status`` is that of HTTP, 0 without an answer; ``error``
    is empty if the answer was whole.
    """

    at: float
    late_s: float
    input_tokens: int
    output_tokens: int
    status: int
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    error: str = ""
    cached_tokens: int = 0
    model: str = ""
    adapter: str = ""
    blocks: tuple[int, ...] = ()

    @property
    def served(self) -> bool:
        """Whether the answer was whole."""
        return self.status == 200 and not self.error


# A timer of the loop ticks in milliseconds; what is later than this was held up by something.
LATE_S = 0.01

# More than this part of the requests being late makes another load than the trace has.
LATE_PART = 0.01

_QUANTILES = (0.5, 0.9, 0.95, 0.99)


class LatencyDistribution(msgspec.Struct, frozen=True):
    """A latency over the requests that have it, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """A replay. ``failed`` counts requests by HTTP status, 0 for no answer, and 200 for a broken one.

    ``sent`` had an answer that was waited for; ``cut`` were open when the replay was stopped. Tokens are of
    served requests. ``late_s`` is how much later requests were sent than the trace has it, and ``kept_pace``
    whether few enough were late.
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


class Tally:
    """Adds up the rows of a replay."""

    def __init__(self) -> None:
        self.sent = 0
        self._served = self._input = self._output = self._late = 0
        self._failed: Counter[int] = Counter()
        self._error = ""
        self._took: dict[str, array[float]] = {
            name: array("d") for name in ("ttft_s", "itl_s", "e2e_s", "late_s")
        }

    def add(self, row: ReplayRow) -> None:
        """Take a request that is over."""
        self.sent += 1
        self._took["late_s"].append(row.late_s)
        self._late += row.late_s > LATE_S
        if not row.served:
            self._failed[row.status] += 1
            self._error = self._error or row.error
            return
        self._served += 1
        self._input += row.input_tokens
        self._output += row.output_tokens
        for name in ("ttft_s", "itl_s", "e2e_s"):
            if (took_s := getattr(row, name)) is not None:
                self._took[name].append(took_s)

    def outcome(self, *, cut: int, duration_s: float) -> RequestResult:
        """All of them together."""
        return RequestResult(
            sent=self.sent,
            served=self._served,
            failed=dict(self._failed),
            cut=cut,
            duration_s=duration_s,
            input_tokens=self._input,
            output_tokens=self._output,
            ttft_s=_spread(self._took["ttft_s"]),
            itl_s=_spread(self._took["itl_s"]),
            e2e_s=_spread(self._took["e2e_s"]),
            late_s=_spread(self._took["late_s"]),
            late=self._late,
            kept_pace=self._late <= LATE_PART * self.sent,
            error=self._error,
        )


def _spread(took_s: array[float]) -> LatencyDistribution | None:
    if not took_s:
        return None
    values = np.frombuffer(took_s)
    p50, p90, p95, p99 = (float(cut) for cut in np.quantile(values, _QUANTILES))
    return LatencyDistribution(float(values.mean()), p50, p90, p95, p99, float(values.max()))
