"""Arrival times: a rate that changes over time, and the burstiness around it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from policy.config.control import Fraction, Seconds, Section

# The rate is constant within a cell: that of its middle.
CELL_S = 1.0

_Instant = Annotated[float, Meta(ge=0)]
_Factor = Annotated[float, Meta(ge=0, le=1000)]


class Diurnal(Section, frozen=True):
    """A sine around the rate with amplitude ``swing`` and period ``period_s``, highest at ``peak_s``.

    The default is a day with its peak at noon.
    """

    period_s: Annotated[float, Meta(ge=60)] = 86_400.0
    swing: Fraction = 0.5
    peak_s: _Instant = 43_200.0

    def scale(self, at: float) -> float:
        """The factor of the rate at the instant ``at``."""
        return 1.0 + self.swing * math.cos(2.0 * math.pi * (at - self.peak_s) / self.period_s)


class Ramp(Section, frozen=True):
    """A linear change from the rate to ``factor`` times the rate, from ``from_s`` on for ``rise_s``."""

    factor: _Factor
    rise_s: Seconds
    from_s: _Instant = 0.0

    def scale(self, at: float) -> float:
        """The factor of the rate at the instant ``at``."""
        return 1.0 + (self.factor - 1.0) * _between((at - self.from_s) / self.rise_s)


class FlashCrowd(Section, frozen=True):
    """A flash crowd: ``factor`` times the rate for ``hold_s`` from ``at_s``, with a rise and a fall."""

    at_s: _Instant
    factor: _Factor
    hold_s: Seconds
    rise_s: Annotated[float, Meta(ge=0)] = 0.0
    fall_s: Annotated[float, Meta(ge=0)] = 0.0

    def scale(self, at: float) -> float:
        """The factor of the rate at the instant ``at``."""
        late = at - self.at_s
        rising = 1.0 + late / self.rise_s if self.rise_s else float(late >= 0.0)
        falling = 1.0 - (late - self.hold_s) / self.fall_s if self.fall_s else float(late < self.hold_s)
        return 1.0 + (self.factor - 1.0) * min(_between(rising), _between(falling))


class RateShape(Section, frozen=True):
    """``rate`` arrivals per second, times the factors of its modulations.

    ``cv`` is the coefficient of variation of the gaps at a constant rate: 1 is a Poisson process, 0 a
    constant gap, above 1 bursts (Gamma).
    """

    rate: Annotated[float, Meta(gt=0, le=1e6)]
    cv: Annotated[float, Meta(ge=0, le=20)] = 1.0
    diurnal: Diurnal | None = None
    ramp: Ramp | None = None
    flashes: tuple[FlashCrowd, ...] = ()

    def at(self, at: float) -> float:
        """The rate at the instant ``at``, per second."""
        factor = math.prod(flash.scale(at) for flash in self.flashes)
        if self.ramp is not None:
            factor *= self.ramp.scale(at)
        return self.rate * factor * (self.diurnal.scale(at) if self.diurnal is not None else 1.0)


def arrival_times(pace: RateShape, rng: random.Random, until_s: float) -> Iterator[float]:
    """Arrival times in order, from 0 to before ``until_s`` seconds.

    A process with a mean gap of 1 runs on a clock at the rate of ``pace``: with exponential gaps this is the
    inhomogeneous Poisson process, with others one that is equally bursty at any rate (the time rescaling
    theorem, Brown et al. 2002).
    """
    gap = _gap(pace.cv, rng)
    for cell in range(math.ceil(until_s / CELL_S)):
        at, end = cell * CELL_S, min((cell + 1) * CELL_S, until_s)
        rate = pace.at((cell + 0.5) * CELL_S)
        while rate > 0.0 and (due := at + gap / rate) < end:
            at = due
            yield at
            gap = _gap(pace.cv, rng)
        gap = max(0.0, gap - rate * (end - at))


def _gap(cv: float, rng: random.Random) -> float:
    """A gap of 1 on average."""
    if cv == 0.0:
        return 1.0
    return rng.expovariate(1.0) if cv == 1.0 else rng.gammavariate(cv**-2, cv**2)


def _between(fraction: float) -> float:
    return min(1.0, max(0.0, fraction))
