"""Counts over sliding windows, in constant space and time."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Final

Count = tuple[int, float]


class RateBins:
    """Counts of ``kinds`` kinds of events per second, over the last ``seconds`` seconds."""

    __slots__ = ("_kinds", "_newest", "_rows")

    def __init__(self, seconds: int, kinds: int) -> None:
        self._kinds = kinds
        # A window begins and ends within a second.
        self._rows = [[0.0] * kinds for _ in range(seconds + 1)]
        self._newest: int | None = None

    def spread(self, begin: float, end: float, counts: Sequence[Count]) -> None:
        """Add ``counts`` (kind, amount), spread evenly from ``begin`` to ``end``; older bins are dropped."""
        rows, newest = self._rows, self._reach(floor(end))
        length = end - begin
        first = max(floor(begin), newest - len(rows) + 1)
        for second in range(first, floor(end) + 1):
            inside = min(end, second + 1.0) - max(begin, float(second))
            part = inside / length if length > 0.0 else 1.0
            row = rows[second % len(rows)]
            for kind, count in counts:
                row[kind] += part * count

    def sums(self, begin: float, end: float) -> list[float]:
        """The sum of each kind from ``begin`` to ``end``.

        The bin of ``begin`` counts in proportion, that of ``end`` in full.
        """
        if self._newest is None:
            return [0.0] * self._kinds
        rows = self._rows
        first = max(floor(begin), self._newest - len(rows) + 1)
        last = min(floor(end), self._newest)
        if last < first:
            return [0.0] * self._kinds
        within = [rows[second % len(rows)] for second in range(first, last + 1)]
        part = min(1.0, first + 1.0 - begin)
        within[0] = [part * count for count in within[0]]
        return [sum(counts) for counts in zip(*within, strict=True)]

    def latest_s(self, end: float, kind: int, enough: float, least_s: float, most_s: float) -> float:
        """The shortest window before ``end`` with at least ``enough`` events of ``kind``.

        Between ``least_s`` and ``most_s`` seconds.
        """
        if self._newest is None:
            return most_s
        rows, counted = self._rows, 0.0
        first = max(floor(end - most_s), self._newest - len(rows))
        for second in range(min(floor(end), self._newest), first, -1):
            counted += rows[second % len(rows)][kind]
            if counted >= enough:
                return min(most_s, max(least_s, end - second))
        return most_s

    def _reach(self, second: int) -> int:
        """Clear the bins up to ``second``; returns the newest second."""
        newest = self._newest
        if newest is None or second > newest:
            gone = len(self._rows) if newest is None else min(len(self._rows), second - newest)
            for i in range(gone):
                self._rows[(second - i) % len(self._rows)] = [0.0] * self._kinds
            newest = self._newest = second
        return newest


SLOTS: Final = 10


class RecentCounts:
    """Two kinds of events over the last ``window_s``, in :data:`SLOTS` slots that expire whole."""

    __slots__ = ("_firsts", "_now", "_seconds", "_slot_s", "first", "second")

    def __init__(self, window_s: float) -> None:
        self._slot_s = window_s / SLOTS
        self.clear()

    def clear(self) -> None:
        """Forget all events."""
        self._now = 0
        self._firsts = [0] * SLOTS
        self._seconds = [0] * SLOTS
        self.first = self.second = 0

    def advance(self, at: float) -> None:
        """Forget what is older than the window before ``at``, in seconds; time never goes back."""
        now = int(at / self._slot_s)
        if now <= self._now:
            return
        for slot in range(max(self._now + 1, now - SLOTS + 1), now + 1):
            place = slot % SLOTS
            self.first -= self._firsts[place]
            self.second -= self._seconds[place]
            self._firsts[place] = self._seconds[place] = 0
        self._now = now

    def add(self, at: float, first: int, second: int) -> None:
        """Count events of both kinds at ``at``."""
        if int(at / self._slot_s) > self._now:
            self.advance(at)
        place = self._now % SLOTS
        self._firsts[place] += first
        self._seconds[place] += second
        self.first += first
        self.second += second
