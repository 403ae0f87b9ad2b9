"""How much longer than foreseen a wait may be, learned from those that were."""

from __future__ import annotations

# One in so many may wait longer than foreseen with the slack, and so may miss its deadline in the queue.
MISSES = 1 / 200
GAIN = 0.1


class Foresight:
    """The :data:`MISSES` quantile of the errors of predicted waits, from above, in seconds.

    Tracked by steps of the size of a mean error: up by ``1 - MISSES`` of one for each error above it, down
    by ``MISSES`` of one for each below, which balance where that part is above. Slots that free in
    groups, shares that change and rates that fall are all in it.
    """

    def __init__(self) -> None:
        self.slack_s = 0.0
        self._mean_s = 0.0

    def learn(self, foreseen_s: float, waited_s: float) -> None:
        """A wait that was foreseen; of one that was given up, so far."""
        error = waited_s - foreseen_s
        # The first errors of a rush are all there is to learn from before it fills the queue.
        self._mean_s += (GAIN if self._mean_s else 1.0) * (abs(error) - self._mean_s)
        if error > self.slack_s:
            self.slack_s += (1.0 - MISSES) * self._mean_s
        else:
            self.slack_s = max(0.0, self.slack_s - MISSES * self._mean_s)
