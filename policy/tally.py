"""Observations that are added up in plain numbers, by bucket."""

from __future__ import annotations

from bisect import bisect_left


class Tally:
    """Observations by bucket, and their sum; ``bounds`` are the upper ends of all buckets but the last."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value
