"""A token bucket whose counts are written by several processes, with debt.

The capacity is the limit, which each minute refills: a full bucket admits a minute's worth at once.
A reservation takes the most that a request may use; what it did not use is refunded, and what it used beyond
is a debt that refill repays. Instants are seconds of one monotonic clock.
"""

from __future__ import annotations

from typing import Final

PERIOD_S: Final = 60.0
# Sums of many refills are not exact.
_ROUNDING: Final = 1e-6
# Without a share of the limit nothing is refilled; one is asked for at once.
NO_SHARE_WAIT_S: Final = 1.0


class TokenBucket:
    """One process's view of a bucket: its ``level`` at the instant ``at``, below 0 if there is debt.

    ``limit`` is per minute, and of it this host has a ``share`` (0..1).
    """

    __slots__ = ("at", "level", "limit", "share")

    def __init__(self, limit: float, share: float, now: float, level: float) -> None:
        self.limit = limit
        self.share = share
        self.at = now
        self.level = min(level, self.capacity)

    @property
    def capacity(self) -> float:
        return self.limit * self.share

    def resize(self, limit: float, share: float) -> None:
        """Another limit or share: more of it is refilled over time, less of it is gone at once."""
        self.limit, self.share = limit, share
        self.level = min(self.level, self.capacity)

    def observe(self, now: float, reserved: float, refunded: float) -> None:
        """Take what all processes reserved and refunded since the last call.

        In which order they did is unknown. The level is therefore what the least favourable order leaves:
        refill before the reservations, of which a full bucket keeps nothing, and after the refunds. It is
        never above that of a bucket that sees each event, and below it by at most the refill since the last
        call.
        """
        capacity = self.capacity
        level = self.level
        elapsed = now - self.at
        if elapsed > 0.0:
            refilled = level + capacity / PERIOD_S * elapsed
            level = min(refilled, max(level, capacity - refunded))
            self.at = now
        self.level = min(capacity, level + refunded - reserved)

    def wait_s(self, tokens: float, mine: float) -> float:
        """Seconds until a request for ``tokens`` fits, if no other comes; 0 if it does.

        ``mine`` of them are taken from the level already. A request for more than the capacity fits a full
        bucket, and leaves a debt.
        """
        missing = min(tokens, self.capacity) - self.level - mine
        if missing <= _ROUNDING:
            return 0.0
        return missing / self.capacity * PERIOD_S if self.capacity > 0.0 else NO_SHARE_WAIT_S

    def refundable(self, unused: float, now: float) -> float:
        """How much of ``unused`` tokens there is room for at ``now``: a full bucket is not made fuller."""
        capacity = self.capacity
        refilled = capacity / PERIOD_S * max(0.0, now - self.at)
        return max(0.0, min(unused, capacity - self.level - refilled))

    def full_in_s(self, refunded: float = 0.0) -> float:
        """After how many seconds the bucket is full, counted by the whole limit if there is no share.

        ``refunded`` are tokens that the level does not have yet.
        """
        share = self.share or 1.0
        return max(0.0, 1.0 - (self.level + refunded) / (self.limit * share)) * PERIOD_S


def level_of(limit: float, share: float, full_in_s: float) -> float:
    """The level of a bucket by :meth:`TokenBucket.full_in_s`."""
    whole = limit * (share or 1.0)
    return whole * (1.0 - full_in_s / PERIOD_S)
