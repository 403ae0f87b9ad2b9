"""What the first tokens that came teach about the seconds that were predicted."""

from __future__ import annotations

import math

GROUP_GAIN = 0.05
# However well it fits: a twentieth off is no outlier.
LEAST_ERROR = 0.05
# What must lie between the groups of short and of long ones to tell a slope from a constant.
APART = 2.0
LEAST = 0.1

SITE_GAIN = 0.1
MOST = math.log(20.0)
STEP = 1.0
# Replicas that differ by less are alike: chance alone makes a mean of 20 differ by a tenth or two.
ALIKE = 0.25
# A replica that no longer gets traffic cannot show that it has recovered: it is believed again by time.
HALF_LIFE_S = 30.0


class OnlineLine:
    """``actual = fixed_s + slope * modelled``, through the means of the short and of the long ones.

    The engine model says nothing of the way there: HTTP, the tokenizer, the network. Neither does a
    generic profile know how fast a server really is. Both are the same for all replicas of a model.
    Two groups (Wald, 1940) because a least-squares slope drowns in the many short ones, whose modelled
    seconds are themselves uncertain; it would come out near 0. Nobody counts for more than the usual
    error, which makes the means medians: less was cached than believed, who came later joined the same
    step, or the replica stood still, and all of that says nothing of the way there.
    """

    __slots__ = ("_error", "_long", "_short", "fixed_s", "slope")

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.slope = 1.0
        self._error = 1.0
        self._short = [0.0, 0.0]
        self._long = [0.0, 0.0]

    def of(self, modelled_s: float) -> float:
        """The seconds to expect."""
        scaled = self.slope * modelled_s
        return max(self.fixed_s + scaled, LEAST * scaled)

    @property
    def usual_s(self) -> float:
        """What the short ones take."""
        return self._short[1]

    def learn(self, modelled_s: float, actual_s: float) -> None:
        """One first token; both in seconds and positive."""
        expected = self.of(modelled_s)
        error, usual = math.log(actual_s / expected), self._error
        actual_s = expected * math.exp(max(-usual, min(usual, error)))
        # Where all are far off it grows by a tenth with each, and they count in full again.
        self._error = max(LEAST_ERROR, usual + GROUP_GAIN * (min(abs(error), 3.0 * usual) - usual))
        if not self._short[0]:  # until more is known, what the model says holds for short and for long
            self._short = [modelled_s / APART, modelled_s / APART]
            self._long = [modelled_s * APART, modelled_s * APART]
        short, long = self._short, self._long
        group = short if modelled_s * modelled_s < short[0] * long[0] else long
        group[0] += GROUP_GAIN * (modelled_s - group[0])
        group[1] += GROUP_GAIN * (actual_s - group[1])
        if long[0] > APART * short[0] and long[1] > short[1]:
            self.slope = (long[1] - short[1]) / (long[0] - short[0])
        self.fixed_s = short[1] - self.slope * short[0]


class InterTokenGaps:
    """How much longer the gaps between tokens are than a step of the engine model; the same for all replicas.

    First tokens do not say so: what a request waits for in an engine is no part of a step.
    """

    __slots__ = ("_log", "factor")

    def __init__(self) -> None:
        self._log = 0.0
        self.factor = 1.0

    def learn(self, step_s: float, gap_s: float) -> None:
        """A stream had a mean gap of ``gap_s`` where steps were to take ``step_s``; both positive."""
        news = math.log(gap_s / step_s) - self._log
        self._log = max(-MOST, min(MOST, self._log + GROUP_GAIN * max(-STEP, min(STEP, news))))
        self.factor = math.exp(self._log)


class PredictionError:
    """How much longer one replica takes than predicted, as a factor: a decaying mean of logarithms.

    ``alike`` is whether that is too little to tell it from the others: its factor is then 1.
    """

    __slots__ = ("_at", "_log", "alike")

    def __init__(self) -> None:
        self._log = 0.0
        self._at = 0.0
        self.alike = True

    def factor(self, at: float) -> float:
        """Actual over predicted: 1 without news or with little, and towards 1 with time."""
        if self.alike:
            return 1.0
        faded = self._log * 0.5 ** ((at - self._at) / HALF_LIFE_S)
        if faded > ALIKE:
            return math.exp(faded - ALIKE)
        return math.exp(faded + ALIKE) if faded < -ALIKE else 1.0

    def learn(self, expected_s: float, actual_s: float, usual_s: float, at: float) -> None:
        """A first token came after ``actual_s`` where all replicas together would say ``expected_s``.

        ``usual_s`` is added to both: a part of what is usual is chance, however many times the least it is.
        """
        faded = self._log * 0.5 ** ((at - self._at) / HALF_LIFE_S)
        news = max(-MOST, min(MOST, math.log((actual_s + usual_s) / (expected_s + usual_s))))
        self._log = faded + SITE_GAIN * max(-STEP, min(STEP, news - faded))
        self._at = at
        self.alike = -ALIKE < self._log < ALIKE
