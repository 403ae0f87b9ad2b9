"""Observations that are added up in plain numbers and merged into a published histogram now and then."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Histogram


class Tally:
    """Observations not yet published, by bucket (seconds)."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class MergedHistogram(Histogram):
    """A histogram that takes a whole tally at once."""

    def merge(self, tally: Tally) -> None:
        """Add ``tally`` and empty it."""
        for i, count in enumerate(tally.counts):
            if count:
                self._buckets[i].inc(count)
                tally.counts[i] = 0
        if tally.total:
            self._sum.inc(tally.total)
            tally.total = 0.0
