"""Exponential back-off: how long to wait before the next attempt after failures in a row."""

from __future__ import annotations

import math
from typing import NamedTuple

# Where no limit is given the delay stops growing here, long before a float overflows.
_MAX_EXPONENT = 64


class Backoff(NamedTuple):
    """The delay before the second attempt is ``first_s`` seconds, then ``factor`` times the one before."""

    first_s: float
    max_s: float = math.inf
    factor: float = 2.0

    def delay_s(self, failures: int) -> float:
        """Seconds to wait after ``failures`` (1 or more) in a row."""
        return min(self.max_s, self.first_s * self.factor ** min(failures - 1, _MAX_EXPONENT))


def failures_after(failures: int, lived_s: float, stable_s: float) -> int:
    """Failures in a row once a process that ran for ``lived_s`` seconds has died.

    One that ran for ``stable_s`` or longer starts a new row.
    """
    return 1 if lived_s >= stable_s else failures + 1
