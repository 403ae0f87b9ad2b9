"""Histograms of durations with fixed buckets, so that those of many workers can be added."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

# Each a fifth of an octave above the one before, from a millisecond to some twenty minutes: a quantile is
# known to 15 %, better within a bucket by interpolation. The last bucket has no upper bound.
BOUNDS: tuple[float, ...] = tuple(0.001 * 2.0 ** (i / 5) for i in range(102))

BUCKETS = len(BOUNDS) + 1

# The bounds of the gateway's metrics: of latencies, and of gaps between events.
SECONDS = (
    0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
GAPS = (
    0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip


def bucket_of(seconds: float) -> int:
    """The bucket of a duration."""
    return bisect_left(BOUNDS, seconds)


def quantile(counts: Sequence[float], part: float) -> float | None:
    """The quantile ``part`` (0..1) in seconds, interpolated within its bucket; ``None`` without counts."""
    total = sum(counts)
    if not total:
        return None
    rank = part * total
    below = 0.0
    for i, count in enumerate(counts):
        if count and below + count >= rank:
            low = BOUNDS[i - 1] if i else 0.0
            high = BOUNDS[i] if i < len(BOUNDS) else low
            return low + (high - low) * max(0.0, rank - below) / count
        below += count
    return BOUNDS[-1]


class HistogramCounter:
    """Observations by bucket, and their sum; ``bounds`` are the upper ends of all buckets but the last."""

    __slots__ = ("_bounds", "_bucket", "_high", "_low", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        # The last observation's bucket, which is that of the next one more often than not, and its ends.
        self._bucket, self._low, self._high = 0, -inf, bounds[0]
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> int:
        """Count one observation; returns its bucket."""
        if not self._low < value <= self._high:
            bounds = self._bounds
            self._bucket = found = bisect_left(bounds, value)
            self._low = bounds[found - 1] if found else -inf
            self._high = bounds[found] if found < len(bounds) else inf
        bucket = self._bucket
        counts = self.counts
        count = counts[bucket]
        counts[bucket] = count + 1
        self.total += value
        return bucket
