"""The time until sessions return, learned from the intervals between their requests.

The hazard of each interval is the product-limit estimate (Kaplan and Meier 1958): sessions that have not
returned yet, most of which never will, count as long as they have waited.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

# Intervals are counted by powers of two of this many seconds, up to over two hours.
FIRST_S: Final = 0.5
INTERVALS: Final = 16
# Turns so far are counted by powers of two too: 1, 2 to 3, 4 to 7, 8 to 15, and more.
TURNS: Final = 5
# Before anything was learned: the probability of a return before it is twice as long ago, and the sessions
# that this assumption counts for.
ASSUMED: Final = 0.3
ASSUMED_SESSIONS: Final = 2.0
POOLED_SESSIONS: Final = 8.0
# Returns until the counts are halved, and between two computations of the table.
SPAN: Final = 8192
EVERY: Final = 256
EVERY_FIRST: Final = 16
# The most sessions that are remembered, and for how long, in seconds.
MOST_SESSIONS: Final = 4096
FORGOTTEN_S: Final = 7200.0


class _Session:
    """The last request of a session: the ``key`` of its replica, its instant, and the number of its turn."""

    __slots__ = ("at", "key", "turns")

    def __init__(self) -> None:
        self.at = 0.0
        self.key = self.turns = 0


class SessionReturns:
    """The return of one model's sessions, by the turns so far and the seconds since the last request."""

    def __init__(self) -> None:
        # The least recent first.
        self.known: OrderedDict[int, _Session] = OrderedDict()
        self._came = [[0.0] * INTERVALS for _ in range(TURNS)]
        self._left = [[0.0] * INTERVALS for _ in range(TURNS)]
        self._seen = 0
        self._soon = [[ASSUMED] * INTERVALS for _ in range(TURNS)]

    def began(self, session: int, key: int, at: float) -> int:
        """The next request of ``session`` goes to the replica ``key``; returns that of its last, or 0."""
        known = self.known
        found = known.get(session)
        if found is None:
            found = known[session] = _Session()
        else:
            known.move_to_end(session)
            self._came[_row(found.turns)][_column(at - found.at)] += 1.0
            self._seen += 1
        former, found.key, found.at = found.key, key, at
        found.turns += 1
        oldest = next(iter(known.values()))
        if len(known) > MOST_SESSIONS or at - oldest.at > FORGOTTEN_S:
            known.popitem(last=False)
            self._left[_row(oldest.turns)][_column(at - oldest.at)] += 1.0
        if former and not self._seen % (EVERY if self._seen > EVERY else EVERY_FIRST):
            self._update(at)
        return former

    def turns(self, session: int) -> int:
        """The turns of ``session`` so far; 0 if it is not known."""
        found = self.known.get(session)
        return 0 if found is None else found.turns

    def last(self, session: int) -> int:
        """The key of the replica of its last request; 0 if it is not known."""
        found = self.known.get(session)
        return 0 if found is None else found.key

    def soon(self, turns: int, since_s: float) -> float:
        """The probability that it returns before the last request is twice as long ago as now."""
        return self._soon[_row(turns)][_column(since_s)]

    def _update(self, at: float) -> None:
        """Compute the table."""
        risk = [[0.0] * INTERVALS for _ in range(TURNS)]
        for session in self.known.values():
            row = risk[_row(session.turns)]
            for i in range(_column(at - session.at)):
                row[i] += 1.0
        for k in range(TURNS):
            over = 0.0
            for i in range(INTERVALS - 1, -1, -1):
                over += self._came[k][i] + self._left[k][i]
                risk[k][i] += over
        pooled = [
            (sum([row[i] for row in self._came]) + ASSUMED * ASSUMED_SESSIONS)
            / (sum([row[i] for row in risk]) + ASSUMED_SESSIONS)
            for i in range(INTERVALS)
        ]
        for k in range(TURNS):
            came = self._came[k]
            stays = [
                1.0 - (came[i] + POOLED_SESSIONS * pooled[i]) / (risk[k][i] + POOLED_SESSIONS)
                for i in range(INTERVALS)
            ]
            # On average half of its interval has passed.
            self._soon[k] = [
                1.0 - (stays[i] * stays[min(i + 1, INTERVALS - 1)]) ** 0.5 for i in range(INTERVALS)
            ]
        if self._seen >= SPAN:
            self._seen = EVERY
            for counts in (self._came, self._left):
                for k in range(TURNS):
                    counts[k] = [0.5 * count for count in counts[k]]


def _row(turns: int) -> int:
    return min(turns.bit_length(), TURNS) - 1


def _column(seconds: float) -> int:
    return min(int(seconds / FIRST_S).bit_length(), INTERVALS - 1)
