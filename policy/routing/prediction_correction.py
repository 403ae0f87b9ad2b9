"""Corrections of predicted times, learned from measured ones."""

from __future__ import annotations

import math
from typing import Final

GROUP_GAIN: Final = 0.05
# The least usual error: 5 % off is no outlier.
LEAST_ERROR: Final = 0.05
# The ratio of the long to the short group from which a slope can be told from a constant.
APART: Final = 2.0
LEAST: Final = 0.1

SITE_GAIN: Final = 0.1
MOST = math.log(20.0)
STEP: Final = 1.0
# Smaller differences are noise: a mean of 20 varies by 10 to 20 % by chance.
ALIKE: Final = 0.25
# The error decays: a replica without traffic cannot show that it has recovered.
HALF_LIFE_S: Final = 30.0


class OnlineLine:
    """``actual = fixed_s + slope * modelled``, through the means of short and of long predictions.

    It corrects for what the engine model leaves out (HTTP, tokenizer, network) and for a wrong profile, the
    same for all replicas of a model. Two groups (Wald, 1940), because the many short predictions, uncertain
    themselves, would pull a least-squares slope towards 0. Errors are clipped to the usual error, so that
    outliers (a stall, an evicted prefix) do not count.
    """

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.slope = 1.0
        self._error = 1.0
        self._short = [0.0, 0.0]
        self._long = [0.0, 0.0]

    def of(self, modelled_s: float) -> float:
        """The corrected prediction in seconds."""
        scaled = self.slope * modelled_s
        return max(self.fixed_s + scaled, LEAST * scaled)

    @property
    def usual_s(self) -> float:
        """The mean of the short group in seconds."""
        return self._short[1]

    def learn(self, modelled_s: float, actual_s: float) -> None:
        """Learn from one first token; both in seconds and positive."""
        expected = self.of(modelled_s)
        error, usual = math.log(actual_s / expected), self._error
        actual_s = expected * math.exp(max(-usual, min(usual, error)))
        # If all are far off, the usual error grows by 10 % with each, until they count in full.
        self._error = max(LEAST_ERROR, usual + GROUP_GAIN * (min(abs(error), 3.0 * usual) - usual))
        if not self._short[0]:  # start from the model for both groups
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
    """The ratio of measured inter-token gaps to the step time of the engine model, for all replicas."""

    def __init__(self) -> None:
        self._log = 0.0
        self.factor = 1.0

    def learn(self, step_s: float, gap_s: float) -> None:
        """Learn from a stream with a mean gap of ``gap_s`` and a predicted ``step_s``; both positive."""
        news = math.log(gap_s / step_s) - self._log
        self._log = max(-MOST, min(MOST, self._log + GROUP_GAIN * max(-STEP, min(STEP, news))))
        self.factor = math.exp(self._log)


class PredictionError:
    """The ratio of measured to predicted times of one replica: a decaying mean of logarithms.

    While ``alike`` the difference is insignificant, and the factor 1.
    """

    def __init__(self) -> None:
        self._log = 0.0
        self._at = 0.0
        self.alike = True

    def factor(self, at: float) -> float:
        """Measured over predicted time; it returns to 1 with time."""
        if self.alike:
            return 1.0
        faded = self._log * 0.5 ** ((at - self._at) / HALF_LIFE_S)
        if faded > ALIKE:
            return math.exp(faded - ALIKE)
        return math.exp(faded + ALIKE) if faded < -ALIKE else 1.0

    def learn(self, expected_s: float, actual_s: float, usual_s: float, at: float) -> None:
        """Learn from a first token after ``actual_s``, with ``expected_s`` predicted for all replicas.

        ``usual_s`` is added to both, so that large ratios of very short times do not count.
        """
        faded = self._log * 0.5 ** ((at - self._at) / HALF_LIFE_S)
        news = max(-MOST, min(MOST, math.log((actual_s + usual_s) / (expected_s + usual_s))))
        self._log = faded + SITE_GAIN * max(-STEP, min(STEP, news - faded))
        self._at = at
        self.alike = -ALIKE < self._log < ALIKE
