"""A margin for predicted waits: the largest recent error."""

from __future__ import annotations

# One to two blocks of waits are remembered: about one wait in a hundred exceeds them all.
BLOCK = 64
# The least margin, as a fraction of the predicted wait: requests of others may still come.
LEAST = 0.1


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

    def slack_s(self, foreseen_s: float) -> float:
        """The margin for a wait of this prediction."""
        return max(self._most_s, self._before_s, LEAST * foreseen_s)

    def learn(self, foreseen_s: float, waited_s: float) -> None:
        """A wait ended, ``waited_s`` after a prediction of ``foreseen_s``."""
        if self._count == BLOCK:
            self._before_s, self._most_s, self._count = self._most_s, 0.0, 0
        self._count += 1
        self._most_s = max(self._most_s, waited_s - foreseen_s)
