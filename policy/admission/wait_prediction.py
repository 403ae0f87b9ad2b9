"""Prediction of a request's wait: the service rate of its queue, and the margin for the error."""

from __future__ import annotations

import math
from itertools import islice
from typing import Final

from policy.types import Priority

# The memory, in seconds of busy time and in service times of a request. Long enough to hold some dozens of
# requests on a few slots, short enough to follow a fleet that grows. Within one service time it says nothing
# that no request began.
MEMORY_S: Final = 5.0
MEMORY_STAYS: Final = 3.0
# The weight of the estimate from requests in flight, as a fraction of the memory.
PRIOR: Final = 0.33
# The least fraction of the rate that a priority is predicted to get.
LEAST_SHARE: Final = 0.05
# So many requests in flight are considered one by one; later ends are assumed to come evenly.
MOST_LOOKED_AT: Final = 128
# The mean relative deviation of service times (0.74 if exponential) from which on slots fall free evenly.
EVEN: Final = 0.5
# A service time counts as at most so many times the mean, which one very long request would else multiply. If
# all become ten times as long, the mean has followed after a dozen of them.
LONGEST: Final = 3.0
# One to two blocks of waits are remembered: about one wait in a hundred exceeds them all.
BLOCK: Final = 64
# The least margin, as a fraction of the predicted wait: requests of others may still come.
LEAST: Final = 0.1
RANK: Final = {priority: rank for rank, priority in enumerate(Priority)}


class ServiceRate:
    """Decayed sums of the tokens that began while requests waited, by priority.

    Before requests waited, and a little afterwards, the rate follows from Little's law: tokens in flight over
    the mean service time; ``unmeasured`` is whether that is unknown as well.
    """

    def __init__(self) -> None:
        self._began = [0.0] * len(RANK)
        self._busy_s = 0.0
        self._since: float | None = None
        self._in_flight = 0
        self._held: dict[int, tuple[float, int]] = {}
        self._stays: float = 0.0
        self._spread = 0.0
        self.unmeasured = True

    def busy(self, at: float, *, waits: bool) -> None:
        """Whether requests wait from ``at`` on while a replica takes every request."""
        if self._since is not None and at > self._since:
            memory_s = self._memory_s()
            kept = math.exp(-(at - self._since) / memory_s)
            self._began = [tokens * kept for tokens in self._began]
            self._busy_s = self._busy_s * kept + memory_s * (1.0 - kept)
        self._since = at if waits else None

    def expect(self, stays_s: float) -> None:
        """No request has ended yet; the performance model predicts this service time (0: unknown)."""
        self._stays = stays_s

    def began(self, ticket: int, tokens: int, priority: Priority, at: float, *, waited: bool) -> None:
        self._in_flight += tokens
        self._held[ticket] = (at, tokens)
        if waited:
            self._began[RANK[priority]] += tokens

    def ended(self, ticket: int, at: float, *, whole: bool) -> None:
        """It ended; ``whole`` if it was served to its end."""
        began_at, tokens = self._held.pop(ticket)
        self._in_flight -= tokens
        if whole:
            stayed_s = at - began_at
            if not self.unmeasured and self._stays:
                self._spread += 0.1 * (min(1.0, abs(stayed_s / self._stays - 1.0)) - self._spread)
                stayed_s = min(stayed_s, LONGEST * self._stays)
            self._stays += (1.0 if self.unmeasured else 0.1) * (stayed_s - self._stays)
            self.unmeasured = False

    def rate(self, priority: Priority) -> float | None:
        """Tokens per second that higher priorities leave to ``priority``; ``None`` while unknown."""
        began, busy_s = self._began_in()
        better = sum(self._began[: RANK[priority]])
        if not began or not busy_s:
            return None
        return max(began - better, LEAST_SHARE * began) / busy_s

    def _began_in(self) -> tuple[float, float]:
        """The tokens that began, and in how many seconds, with those that Little's law adds."""
        began, busy_s = sum(self._began), self._busy_s
        if self._stays and self._in_flight > 0:
            prior_s = PRIOR * self._memory_s()
            began += prior_s * self._in_flight / self._stays
            busy_s += prior_s
        return began, busy_s

    def _memory_s(self) -> float:
        return max(MEMORY_S, MEMORY_STAYS * self._stays)

    def free_s(self, ahead: float, at: float) -> float:
        """Seconds until a slot falls free for a request with ``ahead`` tokens before it; 0 while unknown.

        If all have the mean service time, requests that began together end together, and that is when there
        is a slot, whatever the rate. The more service times differ, the more evenly slots fall free, and then
        the measured rate says when.
        """
        if not self._stays or not self._in_flight:
            return 0.0
        alike_s = self._alike_s(ahead, at)
        began, busy_s = self._began_in()
        even_s = ahead * busy_s / began + self._stays / len(self._held)
        return alike_s - min(1.0, self._spread / EVEN) * max(0.0, alike_s - even_s)

    def _alike_s(self, ahead: float, at: float) -> float:
        """:meth:`free_s` with equal service times. Those that run longer may end at any time."""
        last_at, left = at, ahead
        for began_at, tokens in islice(self._held.values(), MOST_LOOKED_AT):
            last_at = began_at
            left -= tokens
            if left < 0.0:
                return max(0.0, began_at + self._stays - at)
        return max(0.0, last_at + self._stays - at) + left * self._stays / self._in_flight


class WaitMargin:
    """The largest recent excess of a wait over its prediction, in seconds.

    Slots that free in groups, shares that change and rates that fall are all in it. It assumes no
    distribution, and an outlier is forgotten with its block, where a quantile that is tracked in small steps
    would take hundreds of waits to come down.
    """

    def __init__(self) -> None:
        self._count = 0
        self._most_s = 0.0
        self._before_s = 0.0

    def slack_s(self, predicted_s: float) -> float:
        return max(self._most_s, self._before_s, LEAST * predicted_s)

    def learn(self, predicted_s: float, waited_s: float) -> None:
        """A wait ended, ``waited_s`` after a prediction of ``predicted_s``."""
        if self._count == BLOCK:
            self._before_s, self._most_s, self._count = self._most_s, 0.0, 0
        self._count += 1
        self._most_s = max(self._most_s, waited_s - predicted_s)
