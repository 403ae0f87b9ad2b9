"""Observations that are added up in plain numbers and merged into a published histogram now and then."""

from __future__ import annotations

from prometheus_client import Histogram

from policy.tally import Tally


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
