"""How fast a queue drains: tokens that began per second, over the time in which somebody waited."""

from __future__ import annotations

import math

from policy.types import Priority

# The memory, in seconds of busy time. Long enough to hold some dozens of requests of a second on a few
# slots, short enough to follow a fleet that grows.
MEMORY_S = 5.0
# What the estimate from requests in flight counts for, as if measured for so long.
PRIOR_S = 0.5
# Some of the rate is left to a class even if better ones took all of it lately.
LEAST_SHARE = 0.05
RANK = {priority: rank for rank, priority in enumerate(Priority)}


class Drain:
    """Decayed sums of what began while somebody waited, by class.

    Before there was such a time, and a little afterwards, the rate follows from Little's law: tokens in
    flight over the mean time that one stays.
    """

    def __init__(self) -> None:
        self._began = [0.0] * len(RANK)
        self._busy_s = 0.0
        self._since: float | None = None
        self._in_flight = 0
        self._stays: float | None = None

    def busy(self, at: float, *, waits: bool) -> None:
        """Whether somebody waits from ``at`` on, where a replica is there to serve."""
        if self._since is not None and at > self._since:
            passed = at - self._since
            kept = math.exp(-passed / MEMORY_S)
            self._began = [tokens * kept for tokens in self._began]
            self._busy_s = self._busy_s * kept + MEMORY_S * (1.0 - kept)
        self._since = at if waits else None

    def began(self, tokens: int, priority: Priority, *, waited: bool) -> None:
        """A request of so many tokens began."""
        self._in_flight += tokens
        if waited:
            self._began[RANK[priority]] += tokens

    def ended(self, tokens: int, stayed_s: float, *, whole: bool) -> None:
        """One of so many tokens ended, ``stayed_s`` after it began; ``whole`` if it was served to its end."""
        self._in_flight -= tokens
        if whole:
            self._stays = stayed_s if self._stays is None else self._stays + 0.1 * (stayed_s - self._stays)

    def rate(self, priority: Priority) -> float | None:
        """Tokens per second that are left to a class by those before it; ``None`` while unknown."""
        began, busy_s = sum(self._began), self._busy_s
        better = sum(self._began[: RANK[priority]])
        if self._stays and self._in_flight > 0:
            began += PRIOR_S * self._in_flight / self._stays
            busy_s += PRIOR_S
        if not began or not busy_s:
            return None
        return max(began - better, LEAST_SHARE * began) / busy_s
