"""A count of recent events that halves once every half-life."""

from __future__ import annotations

from math import log

LN2 = log(2.0)


class DecayingCount:
    """An exponentially decaying count; each call gets the instant ``at`` in seconds, which never goes back.

    A steady stream of one event per second converges to ``half_life_s / ln 2``, so that the rate is the
    count divided by that.
    """

    __slots__ = ("_at", "_count", "half_life_s")

    def __init__(self, half_life_s: float, at: float = 0.0) -> None:
        self.half_life_s = half_life_s
        self._at = at
        self._count = 0.0

    def count(self, at: float) -> float:
        """The decayed count."""
        return self._count * float(0.5 ** (max(0.0, at - self._at) / self.half_life_s))

    def rate(self, at: float) -> float:
        """Events per second."""
        return self.count(at) * LN2 / self.half_life_s

    def add(self, at: float, amount: float = 1.0) -> None:
        """Count ``amount`` more events."""
        self._count = self.count(at) + amount
        self._at = max(self._at, at)
