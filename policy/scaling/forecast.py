"""What a rate will be in a while, and how far such forecasts were off: a damped trend, and its own errors.

Holt's linear smoothing with a damped trend (Gardner and McKenzie 1985), for observations at irregular times
(Wright 1986): each constant is a time, so that it means the same at any interval of decisions. Forecasts that
were made are kept until their instant has come; what they missed is the error that the next may have.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec

from policy.signals.types import Rates
from policy.stats.quantiles import interpolated

# A forecast is tried out this often within one horizon, and so many errors are remembered: over sixteen
# horizons, longer than a burst lasts, and in under a kilobyte.
TRIALS = 4
ERRORS = 64
# What was not tried yet may be short by such a part: so one jump is not most of what was ever seen.
UNTRIED = 0.2
# Horizons of a ratio up to this one have the same errors.
ALIKE = 1.5
# The root of a count has a standard deviation of a half, whatever the count: by chance it is off by so many
# of them once in four thousand times.
JUMP = 3.5
# Observations closer than this are one.
APART_S = 0.1
# How long a trend lasts where no policy says how long.
LASTS_S = 200.0
_DIGITS = 4


class Smoothing(msgspec.Struct, frozen=True):
    """The smoothing times of level and trend, and the decay time of a trend, in seconds."""

    level_s: float
    trend_s: float
    lasts_s: float


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a rate: its ``level`` and ``trend`` (per second) as of ``at``.

    Until ``jumps_until`` the level equals the rate. ``pending`` are forecasts for ``horizon_s`` ahead with
    their due times; ``errors`` are differences of square roots (measured minus forecast), whose spread does
    not depend on the rate.
    """

    at: float
    level: float
    trend: float = 0.0
    jumps_until: float = 0.0
    horizon_s: float = 0.0
    pending: tuple[tuple[float, float], ...] = ()
    errors: tuple[float, ...] = ()


def observed(
    series: Series | None, at: float, rate: float, smoothing: Smoothing, over_s: float = 0.0
) -> Series:
    """The series with one more observation; one no newer than the last changes nothing.

    If the rate is a mean over ``over_s`` seconds, a significant jump sets the level at once, until the mean
    covers only the time after it.
    """
    if series is None:
        return Series(at, rate)
    elapsed = at - series.at
    if elapsed < APART_S:
        return series
    expected = ahead(series, elapsed, smoothing)
    until = series.jumps_until
    if 2 * abs(math.sqrt(rate * over_s) - math.sqrt(max(0.0, series.level) * over_s)) > JUMP:
        until = at + over_s
    if at < until:
        return msgspec.structs.replace(series, at=at, level=rate, trend=0.0, jumps_until=until)
    believed = -math.expm1(-elapsed / smoothing.level_s)
    level = expected + believed * (rate - expected)
    kept = series.trend * math.exp(-elapsed / smoothing.lasts_s)
    turned = -math.expm1(-elapsed / smoothing.trend_s)
    trend = kept + turned * ((level - series.level) / elapsed - kept)
    return msgspec.structs.replace(series, at=at, level=level, trend=trend)


def ahead(series: Series, horizon_s: float, smoothing: Smoothing) -> float:
    """The forecast rate ``horizon_s`` seconds after the last observation; falls are not extrapolated."""
    return series.level + max(0.0, series.trend) * _lasting(horizon_s, smoothing.lasts_s)


def tried(series: Series, rate: float, horizon_s: float, forecast: float) -> Series:
    """The series with the due forecasts compared to ``rate``, and with this one pending."""
    if not 1 / ALIKE <= (series.horizon_s or horizon_s) / horizon_s <= ALIKE:
        series = msgspec.structs.replace(series, horizon_s=horizon_s, pending=(), errors=())
    due = [said for when, said in series.pending if when <= series.at]
    pending = tuple(each for each in series.pending if each[0] > series.at)
    errors = (*series.errors, *(round(math.sqrt(rate) - math.sqrt(said), _DIGITS) for said in due))
    last = pending[-1][0] - series.horizon_s if pending else -math.inf
    if series.at - last >= horizon_s / TRIALS and len(pending) < 2 * TRIALS:
        pending = (*pending, (series.at + horizon_s, round(forecast, _DIGITS)))
    return msgspec.structs.replace(series, horizon_s=horizon_s, pending=pending, errors=errors[-ERRORS:])


def shortfall(series: Series, part: float, forecast: float) -> float:
    """The quantile ``part`` (0..1) of the shortfall of such forecasts, in requests per second; 0 or more."""
    said = math.sqrt(forecast)
    untried = [math.sqrt(1.0 + UNTRIED) * said - said] * (ERRORS - len(series.errors))
    error = interpolated([*series.errors, *untried], part)
    return max(0.0, (said + error) ** 2 - forecast) if error > 0 else 0.0


def likely(arrivals: Rates, seconds: float, part: float) -> float:
    """The mean rate that the next so many ``seconds`` stay within, with a probability of ``part`` (0..1).

    It is made of the mean of the last minute. Where that is above the mean of ten minutes, the rise from the
    middle of these to the middle of that goes on, and fades as a trend does. Chance adds to the count of the
    minute and to that of those seconds what it adds to requests that come each for itself.
    """
    over_s = max(1.0, seconds)
    rise = max(0.0, arrivals.last_60_s - arrivals.last_600_s) / ((600.0 - 60.0) / 2)
    level = max(0.0, arrivals.last_60_s) + rise * _lasting(over_s, LASTS_S)
    if not level:
        return 0.0
    # The root of a count has a standard deviation of a half.
    chance = NormalDist().inv_cdf(part) / 2 * math.sqrt(1 / 60.0 + 1 / over_s)
    return (math.sqrt(level) + chance) ** 2


def _lasting(horizon_s: float, lasts_s: float) -> float:
    """For how many seconds of the horizon a trend counts that fades away."""
    return -lasts_s * math.expm1(-horizon_s / lasts_s)
