"""From numbers to places on a chart: axes whose ticks are round numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Decades of a logarithmic axis beyond which the smallest values are cut off.
DECADES = 5
_ROUND = (1, 2, 5, 10)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps ``low`` .. ``high`` to ``start`` .. ``end`` in pixels, by logarithms where ``log``.

    What is ``whole`` is counted, and has no ticks between whole numbers.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        """The place of ``value``, kept within the chart."""
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * part

    def ticks(self, most: int) -> list[float]:
        """At most about ``most`` round numbers of the range; of a logarithmic one powers of ten.

        Between those of a logarithmic range of at most two decades there are their doubles and halves.
        """
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            digits = (1, 2, 5) if self.high <= 100 * self.low * (1 + 1e-9) else (1,)
            found = [each * 10.0**power for power in range(first, last + 1) for each in digits]
            within = [each for each in found if self.low * (1 - 1e-9) <= each <= self.high * (1 + 1e-9)]
            return within[:: math.ceil(len(within) / (most + 2))]
        step = rounded((self.high - self.low) / most)
        step = max(step, 1.0) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def linear(high: float, start: float, end: float, *, whole: bool = False) -> Scale:
    """From 0 to a round number that is ``high`` or a little more."""
    step = rounded(max(high, 1e-9) / 4)
    step = max(step, 1.0) if whole else step
    top = step * math.ceil(high / step - 1e-9) if high > 0 else 1.0
    return Scale(0.0, top, start, end, whole=whole)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """Round numbers around ``low`` .. ``high``, which are more than 0, one at least twice the other."""
    top = rounded(high)
    # The round number below is one over the round number above one over it: 1, 2 and 5 mirror each other.
    bottom = max(1 / rounded(1 / low), top / 10**DECADES)
    return Scale(min(bottom, top / 2), top, start, end, log=True)


def rounded(step: float) -> float:
    """``step``, or the next larger number that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(each * power for each in _ROUND if each * power >= step * (1 - 1e-9))


def times(until: float, most: int = 6) -> list[float]:
    """Round instants from 0 ``until`` so many seconds, of which people count whole minutes and hours."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
    step = next((each for each in steps if until / each <= most), 86_400 * math.ceil(until / most / 86_400))
    return [float(step * i) for i in range(math.floor(until / step) + 1)]
