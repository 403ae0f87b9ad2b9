from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.duration import parse_duration, parse_period


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90s", 90), ("30m", 1800), ("30min", 1800), ("2h", 7200), ("1h30m", 5400), ("1d", 86_400)),
        *(("0.5h", 1800), ("", 0), ("30", 0), ("m", 0), ("30x", 0), ("30m later", 0), ("-5m", 0), ("0s", 0)),
        *(("1h30", 0), ("9" * 400 + "d", 0), ("٣d", 0)),
    ],
)
def test_a_duration_is_parsed_to_seconds_or_zero(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.integers(1, 99), st.integers(1, 59), st.integers(1, 59))
def test_parts_of_a_duration_add_up(hours: int, minutes: int, seconds: int) -> None:
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize(
    ("text", "period"),
    [
        *(("1mo", (0, 1)), ("12mo", (0, 12)), ("1m", (60, 0)), ("7d", (604_800, 0)), ("1h30m", (5400, 0))),
        *(("1.5h", (5400, 0)), ("1.5s", (0, 0)), ("0mo", (0, 0)), ("0d", (0, 0)), ("1d1mo", (0, 0))),
        *(("999999999d999999999d", (0, 0)), ("1w", (0, 0)), ("", (0, 0))),
    ],
)
def test_a_period_is_whole_seconds_or_months(text: str, period: tuple[int, int]) -> None:
    assert parse_period(text) == period
