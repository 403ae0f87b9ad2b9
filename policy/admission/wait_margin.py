"""How much longer than foreseen a wait may be, learned from those that were."""

from __future__ import annotations

# As many waits are remembered, and as many again: about one in a hundred is longer than any of them was.
BLOCK = 64
# However well they were foreseen, one may be longer by such a part of it: some may yet come that were not.
LEAST = 0.1


class WaitMargin:
    """The largest error of the last waits that were foreseen, from above, in seconds.

    Slots that free in groups, shares that change and rates that fall are all in it. Whatever the errors
    are distributed like, and a machine that stood still once is forgotten with its block, where a
    quantile that is tracked in small steps would take hundreds of waits to come down again.
    """

    def __init__(self) -> None:
        self._count = 0
        self._most_s = 0.0
        self._before_s = 0.0

    def slack_s(self, foreseen_s: float) -> float:
        """How much longer a wait that is foreseen may get."""
        return max(self._most_s, self._before_s, LEAST * foreseen_s)

    def learn(self, foreseen_s: float, waited_s: float) -> None:
        """A wait that was foreseen; of one that was given up, so far."""
        if self._count == BLOCK:
            self._before_s, self._most_s, self._count = self._most_s, 0.0, 0
        self._count += 1
        self._most_s = max(self._most_s, waited_s - foreseen_s)
