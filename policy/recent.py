"""Counts of what happened lately, in constant space and time."""

from __future__ import annotations

SLOTS = 10


class Recent:
    """Two kinds of events over the last ``window_s``, in :data:`SLOTS` slots that expire whole."""

    __slots__ = ("_firsts", "_now", "_seconds", "_slot_s", "first", "second")

    def __init__(self, window_s: float) -> None:
        self._slot_s = window_s / SLOTS
        self.clear()

    def clear(self) -> None:
        """As if nothing had happened."""
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
        """Count so many of each kind at ``at``."""
        if int(at / self._slot_s) > self._now:
            self.advance(at)
        place = self._now % SLOTS
        self._firsts[place] += first
        self._seconds[place] += second
        self.first += first
        self.second += second
