"""Forecasts follow ramps, damp trends, and estimate their own shortfall."""

from __future__ import annotations

import math
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.scaling import forecast as forecasting
from policy.scaling.forecast import (
    RateForecastState,
    Smoothing,
    forecast_rate,
    likely,
    observed,
    shortfall,
    with_trial,
)
from policy.signals.types import Rates

SMOOTHING = Smoothing(20.0, 60.0, 200.0)


def followed(rates: list[float], every_s: float = 5.0) -> RateForecastState:
    series = None
    for i, rate in enumerate(rates):
        series = observed(series, 1e9 + i * every_s, rate, SMOOTHING)
    assert series is not None
    return series


@pytest.mark.parametrize("every_s", [1.0, 5.0, 20.0])
def test_a_ramp_is_followed_at_any_interval(every_s: float) -> None:
    """One request per second more in ten seconds: in 30 s nearly three more."""
    ramp = [10.0 + 0.1 * i * every_s for i in range(int(600 / every_s))]
    series = followed(ramp, every_s)
    assert series.level == pytest.approx(ramp[-1], abs=1.5)
    assert 1.5 < forecast_rate(series, 30.0, SMOOTHING) - series.level < 3.0


def test_a_trend_fades() -> None:
    series = RateForecastState(0.0, 10.0, trend=0.1)
    near, far, farther = (
        forecast_rate(series, horizon_s, SMOOTHING) - 10.0 for horizon_s in (1.0, 3000.0, 6000.0)
    )
    assert near == pytest.approx(0.1, rel=0.01)
    assert far == pytest.approx(0.1 * 200.0, rel=0.01)
    assert farther == pytest.approx(far, rel=0.01)


def test_falls_are_not_extrapolated() -> None:
    falling = followed([50.0 - i / 2 for i in range(60)])
    assert falling.trend < -0.05
    assert forecast_rate(falling, 600.0, SMOOTHING) == falling.level == pytest.approx(22.5, abs=1.5)
    assert followed([50.0] * 20 + [5.0] * 20).level > 5.0


def sliding(rates: list[float], at: int) -> float:
    """The mean of ``rates`` per second over the six seconds before ``at``."""
    return sum(rates[max(0, at - 5) : at + 1]) / 6


@pytest.mark.parametrize(("before", "after"), [(1.0, 6.0), (6.0, 1.0), (50.0, 90.0)])
def test_a_significant_jump_is_followed_at_once(before: float, after: float) -> None:
    rates = [before] * 20 + [after] * 12
    quick = slow = RateForecastState(1e9, before)
    for i in range(1, len(rates)):
        quick = observed(quick, 1e9 + i, sliding(rates, i) if i > 5 else before, SMOOTHING, 6.0)
        slow = observed(slow, 1e9 + i, sliding(rates, i) if i > 5 else before, SMOOTHING)
        if i == 25:
            assert quick.level == pytest.approx(after)
    assert abs(slow.level - after) > 0.4 * abs(before - after)
    assert quick.level == pytest.approx(after, rel=0.02)


def test_random_variation_is_no_jump() -> None:
    """Twelve requests in six seconds where six are usual, or none."""
    for rate in (2.0, 0.5):
        series = observed(RateForecastState(1e9, 1.0), 1e9 + 1.0, rate, SMOOTHING, 6.0)
        assert series.jumps_until == 0.0
        assert abs(series.level - 1.0) < 0.1


def test_an_observation_that_is_not_newer_changes_nothing() -> None:
    series = followed([5.0, 6.0])
    assert observed(series, series.at, 99.0, SMOOTHING) == series
    assert observed(series, series.at - 60.0, 99.0, SMOOTHING) == series


def test_the_error_of_a_forecast_is_known_at_its_due_time() -> None:
    series = with_trial(RateForecastState(100.0, 9.0), 9.0, 30.0, 9.0)
    assert series.pending == ((130.0, 9.0),)
    before = with_trial(msgspec.structs.replace(series, at=129.0), 12.0, 30.0, 10.0)
    assert (before.errors, len(before.pending)) == ((), 2)
    after = with_trial(msgspec.structs.replace(before, at=130.0), 12.0, 30.0, 11.0)
    assert after.errors == (0.4641,)  # the root of 12 over that of 9
    assert [when for when, _ in after.pending] == [159.0]


def test_pending_forecasts_and_errors_are_bounded() -> None:
    series = RateForecastState(0.0, 9.0)
    for at in range(3000):
        series = with_trial(msgspec.structs.replace(series, at=float(at)), 9.0, 30.0, 9.0)
        assert len(series.pending) <= forecasting.TRIALS + 1
    assert len(series.errors) == forecasting.ERRORS
    assert len(msgspec.json.encode(series)) < 1000


def test_errors_are_of_similar_horizons() -> None:
    series = RateForecastState(0.0, 9.0, horizon_s=30.0, pending=((10.0, 9.0),), errors=(1.0,) * 20)
    assert with_trial(series, 9.0, 44.0, 9.0).errors == series.errors
    longer = with_trial(series, 9.0, 120.0, 9.0)
    assert (longer.errors, longer.pending, longer.horizon_s) == ((), ((120.0, 9.0),), 120.0)


def test_the_shortfall_is_a_quantile_of_the_errors() -> None:
    errors = tuple((i - 31.5) / 10 for i in range(forecasting.ERRORS))
    series = RateForecastState(0.0, 9.0, errors=errors)
    assert shortfall(series, 0.9, 16.0) == pytest.approx((4.0 + 0.8 * 3.15) ** 2 - 16.0)
    assert shortfall(series, 0.5, 16.0) == pytest.approx(0.0)
    assert shortfall(RateForecastState(0.0, 9.0, errors=(-1.0,) * forecasting.ERRORS), 0.9, 16.0) == 0.0


def test_missing_errors_count_as_an_assumed_fraction() -> None:
    assert shortfall(RateForecastState(0.0, 9.0), 0.9, 10.0) == pytest.approx(forecasting.UNTRIED * 10.0)
    most = RateForecastState(0.0, 9.0, errors=(0.0,) * (forecasting.ERRORS - 2))
    assert shortfall(most, 0.9, 10.0) == 0.0
    assert shortfall(most, 0.99, 10.0) == pytest.approx(forecasting.UNTRIED * 10.0)


def test_one_jump_is_soon_forgotten() -> None:
    """From one to six requests per second for a minute, and back: two minutes later it is forgotten."""
    series, shortfalls = None, []
    for i in range(120):
        rate = 6.0 if 24 <= i < 36 else 1.0
        series = observed(series, 1e9 + 5.0 * i, rate, SMOOTHING)
        forecast = forecast_rate(series, 30.0, SMOOTHING)
        series = with_trial(series, rate, 30.0, forecast)
        shortfalls.append(shortfall(series, 0.9, forecast) + forecast)
    assert shortfalls[23] == pytest.approx(1.2, abs=0.01)
    assert max(shortfalls[24:40]) > 6.0
    assert all(each < 1.3 for each in shortfalls[60:])


rates = st.floats(0.0, 1e9)


@given(
    st.lists(st.tuples(st.floats(0.0, 1e6), rates), max_size=20),
    rates,
    st.floats(0.0, 1e9),
    st.floats(1, 3600),
)
def test_the_forecast_grows_with_the_rate(
    history: list[tuple[float, float]], rate: float, more: float, horizon_s: float
) -> None:
    series, at = None, 1e9
    for elapsed, seen in history:
        at += elapsed
        series = observed(series, at, seen, SMOOTHING)
    low = forecast_rate(observed(series, at + 5.0, rate, SMOOTHING), horizon_s, SMOOTHING)
    high = forecast_rate(observed(series, at + 5.0, rate + more, SMOOTHING), horizon_s, SMOOTHING)
    assert math.isfinite(high)
    assert high >= low * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.3, 2.0, 20.0])
@pytest.mark.parametrize("seconds", [10.0, 60.0, 300.0])
def test_the_likely_rate_is_exceeded_at_most_once_in_twenty(rate: float, seconds: float) -> None:
    """Poisson arrivals at a steady rate, of which the last minute was counted."""
    stream = Random(7)  # noqa: S311 - loads are no secret
    over = 0
    for _ in range(2000):
        minute, next_ones = (_count(stream, rate * length) for length in (60.0, seconds))
        measured = Rates(last_6_s=0.0, last_20_s=0.0, last_60_s=minute / 60, last_600_s=rate)
        over += next_ones / seconds > likely(measured, seconds, 0.95)
    assert over / 2000 <= 0.06


def test_the_likely_rate_extrapolates_rises_only() -> None:
    def measured(minute: float, ten: float) -> Rates:
        return Rates(last_6_s=minute, last_20_s=minute, last_60_s=minute, last_600_s=ten)

    steady = likely(measured(100.0, 100.0), 100.0, 0.5)
    assert steady == pytest.approx(100.0)
    assert likely(measured(100.0, 200.0), 100.0, 0.5) == pytest.approx(100.0)
    # A request per second more each 2.7 s, of which 79 of 100 s count.
    assert likely(measured(200.0, 100.0), 100.0, 0.5) == pytest.approx(200.0 + 100 / 270 * 78.7, rel=1e-3)
    assert likely(measured(0.0, 0.0), 100.0, 0.95) == 0.0


def _count(stream: Random, mean: float) -> int:
    """A Poisson-distributed number with this mean."""
    count, at = 0, stream.expovariate(1.0)
    while at < mean:
        count, at = count + 1, at + stream.expovariate(1.0)
    return count
