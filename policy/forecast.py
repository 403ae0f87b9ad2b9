"""What a rate will be in a while, and how far such forecasts were off: a damped trend, and its own errors.

Holt's linear smoothing with a damped trend (Gardner and McKenzie 1985), for observations at irregular times
(Wright 1986): each constant is a time, so that it means the same at any interval of decisions. Forecasts that
were made are kept until their instant has come; what they missed is the error that the next may have.
"""

from __future__ import annotations

import math

import msgspec

# A forecast is tried out this often within one horizon, and so many errors are remembered.
TRIALS = 8
ERRORS = 64
# Fewer errors than these say nothing of a quantile.
ENOUGH = 8
# Two horizons of a ratio up to this one have the same errors.
_ALIKE = 1.5
PRIOR = 0.15
POWER = 0.5


class Smoothing(msgspec.Struct, frozen=True):
    """How long it takes to believe a new level, and a new trend, and how long a trend lasts, in seconds."""

    level_s: float = 20.0
    trend_s: float = 60.0
    lasts_s: float = 120.0


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is remembered of a rate: its ``level`` and ``trend`` (per second) as of ``at``.

    ``pending`` are forecasts by when they are due, made for ``horizon_s`` ahead; ``errors`` what those
    that came due were short of, as parts of what they said; negative where they said too much.
    """

    at: float
    level: float
    trend: float = 0.0
    horizon_s: float = 0.0
    pending: tuple[tuple[float, float], ...] = ()
    errors: tuple[float, ...] = ()


def observed(series: Series | None, at: float, rate: float, smoothing: Smoothing) -> Series:
    """The series with one observation more; one that is not newer than the last changes nothing."""
    if series is None:
        return Series(at, rate)
    elapsed = at - series.at
    if elapsed <= 0:
        return series
    expected = series.level + series.trend * _lasting(elapsed, smoothing.lasts_s)
    believed = 1.0 - math.exp(-elapsed / smoothing.level_s)
    level = max(0.0, expected + believed * (rate - expected))
    kept = series.trend * math.exp(-elapsed / smoothing.lasts_s)
    turned = 1.0 - math.exp(-elapsed / smoothing.trend_s)
    trend = kept + turned * ((level - series.level) / elapsed - kept)
    return msgspec.structs.replace(series, at=at, level=level, trend=trend)


def ahead(series: Series, horizon_s: float, smoothing: Smoothing) -> float:
    """The rate that is expected so many seconds after the last observation."""
    return max(0.0, series.level + series.trend * _lasting(horizon_s, smoothing.lasts_s))


def tried(series: Series, rate: float, horizon_s: float, forecast: float) -> Series:
    """The series with those forecasts resolved that are due, by the ``rate`` that came, and this one pending."""
    if not _ALIKE > (series.horizon_s or horizon_s) / horizon_s > 1 / _ALIKE:
        series = msgspec.structs.replace(series, horizon_s=horizon_s, pending=(), errors=())
    due = [said for when, said in series.pending if when <= series.at]
    pending = tuple(each for each in series.pending if each[0] > series.at)
    errors = (*series.errors, *((rate - said) / _scale(said) for said in due))[-ERRORS:]
    newest = pending[-1][0] - horizon_s if pending else -math.inf
    if series.at - newest >= horizon_s / TRIALS and len(pending) < 2 * TRIALS:
        pending = (*pending, (series.at + horizon_s, forecast))
    return msgspec.structs.replace(series, horizon_s=horizon_s, pending=pending, errors=errors)


def shortfall(series: Series, part: float, window_s: float, forecast: float) -> float:
    """What ``part`` (0..1) of forecasts like this one are short of at most, per second; 0 or more.

    Before enough of them came due, that of a Poisson process of this rate counted over ``window_s``.
    """
    if len(series.errors) < ENOUGH:
        return math.hypot(_normal(part) * math.sqrt(forecast / window_s), PRIOR * forecast)
    ordered = sorted(series.errors)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    error = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return max(0.0, error * _scale(forecast))


def _scale(rate: float) -> float:
    return float(max(rate, 0.01) ** POWER)


def _lasting(horizon_s: float, lasts_s: float) -> float:
    """For how many seconds of the horizon a trend counts that fades away."""
    return lasts_s * (1.0 - math.exp(-horizon_s / lasts_s))


def _normal(part: float) -> float:
    """The normal quantile of the upper half, to 1 %."""
    tail = math.sqrt(-2.0 * math.log(max(1.0 - max(part, 0.5), 1e-9)))
    return max(0.0, tail - (2.30753 + 0.27061 * tail) / (1.0 + 0.99229 * tail + 0.04481 * tail * tail))
