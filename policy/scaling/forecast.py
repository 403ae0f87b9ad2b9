"""Forecasts of a rate by a damped trend, and the distribution of their errors.

Holt's linear smoothing with a damped trend (Gardner and McKenzie 1985), for observations at irregular times
(Wright 1986): each constant is a time, so it means the same at any interval of decisions. Each forecast is
kept until it is due; the errors so far are those to expect.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec

from policy.signals.types import Rates
from policy.stats.quantiles import interpolated

# Forecasts kept per horizon, and errors kept: sixteen horizons, longer than a burst, in under a kilobyte.
TRIALS = 4
ERRORS = 64
# The assumed relative shortfall for each missing error, so that one jump does not dominate few errors.
UNTRIED = 0.2
# Horizons of a ratio up to this one have the same errors.
ALIKE = 1.5
# In standard deviations of the root of a count, which are a half: exceeded by chance once in 4,000 times.
JUMP = 3.5
# Observations closer than this are one.
APART_S = 0.1
# The decay time of a trend in :func:`likely`.
LASTS_S = 200.0
_DIGITS = 4


class Smoothing(msgspec.Struct, frozen=True):
    """The smoothing times of level and trend, and the decay time of a trend, in seconds."""

    level_s: float
    trend_s: float
    lasts_s: float


class RateForecastState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    series: RateForecastState | None, at: float, rate: float, smoothing: Smoothing, over_s: float = 0.0
) -> RateForecastState:
    """The series with one more observation; one no newer than the last changes nothing.

    If the rate is a mean over ``over_s`` seconds, a significant jump sets the level at once, until the mean
    covers only the time after it.
    """
    if series is None:
        return RateForecastState(at, rate)
    elapsed = at - series.at
    if elapsed < APART_S:
        return series
    expected = forecast_rate(series, elapsed, smoothing)
    until = series.jumps_until
    if 2 * abs(math.sqrt(rate * over_s) - math.sqrt(max(0.0, series.level) * over_s)) > JUMP:
        until = at + over_s
    if at < until:
        return msgspec.structs.replace(series, at=at, level=rate, trend=0.0, jumps_until=until)
    weight = -math.expm1(-elapsed / smoothing.level_s)
    level = expected + weight * (rate - expected)
    decayed = series.trend * math.exp(-elapsed / smoothing.lasts_s)
    trend_weight = -math.expm1(-elapsed / smoothing.trend_s)
    trend = decayed + trend_weight * ((level - series.level) / elapsed - decayed)
    return msgspec.structs.replace(series, at=at, level=level, trend=trend)


def forecast_rate(series: RateForecastState, horizon_s: float, smoothing: Smoothing) -> float:
    """The forecast rate ``horizon_s`` seconds after the last observation; falls are not extrapolated."""
    return series.level + max(0.0, series.trend) * _lasting(horizon_s, smoothing.lasts_s)


def with_trial(
    series: RateForecastState, rate: float, horizon_s: float, forecast: float
) -> RateForecastState:
    """The series with the due forecasts compared to ``rate``, and with this one pending."""
    if not 1 / ALIKE <= (series.horizon_s or horizon_s) / horizon_s <= ALIKE:
        series = msgspec.structs.replace(series, horizon_s=horizon_s, pending=(), errors=())
    due = [value for when, value in series.pending if when <= series.at]
    pending = tuple(each for each in series.pending if each[0] > series.at)
    errors = (*series.errors, *(round(math.sqrt(rate) - math.sqrt(value), _DIGITS) for value in due))
    last = pending[-1][0] - series.horizon_s if pending else -math.inf
    if series.at - last >= horizon_s / TRIALS and len(pending) < 2 * TRIALS:
        pending = (*pending, (series.at + horizon_s, round(forecast, _DIGITS)))
    return msgspec.structs.replace(series, horizon_s=horizon_s, pending=pending, errors=errors[-ERRORS:])


def shortfall(series: RateForecastState, part: float, forecast: float) -> float:
    """The quantile ``part`` (0..1) of the shortfall of such forecasts, in requests per second; 0 or more."""
    root = math.sqrt(forecast)
    untried = [math.sqrt(1.0 + UNTRIED) * root - root] * (ERRORS - len(series.errors))
    error = interpolated([*series.errors, *untried], part)
    return max(0.0, (root + error) ** 2 - forecast) if error > 0 else 0.0


def likely(arrivals: Rates, seconds: float, part: float) -> float:
    """The quantile ``part`` (0..1) of the mean rate over the next ``seconds``.

    The mean of the last minute, plus its rise over the mean of ten minutes as a damped trend, plus the random
    variation of Poisson arrivals in that minute and in these seconds.
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
    """The effective seconds of a trend with this decay time over the horizon."""
    return -lasts_s * math.expm1(-horizon_s / lasts_s)
