"""Cron expressions: the values of crontab(5), and where a time is between those of two of them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.cron import cron, is_between

DAY_S = 86_400


def wall_s(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("start", "end", "inside", "outside"),
    [
        ("0 22 * * *", "30 6 * * *", ["2024-03-01T22:00", "2024-03-02T06:29"], ["2024-03-02T06:30"]),
        ("*/20 9-10 * * *", "10-59/20 9-10 * * *", ["2024-03-01T09:40"], ["2024-03-01T09:55"]),
        ("0 0 29 2 *", "0 0 1 3 *", ["2024-02-29T12:00"], ["2023-02-28T12:00", "2101-02-28T12:00"]),
        # Two restricted day fields are alternatives, also with a step.
        ("0 0 13 * fri", "0 12 * * *", ["2024-03-13T01:00", "2024-03-15T01:00"], ["2024-03-14T01:00"]),
        ("0 0 */9 * fri", "0 12 * * *", ["2024-03-10T01:00", "2024-03-15T01:00"], ["2024-03-14T01:00"]),
        ("0 8 1,15 jan-mar 7", "0 9 * * *", ["2024-02-15T08:30", "2024-01-07T08:30"], ["2024-04-07T08:30"]),
        ("0 8 * * *", "0 8 * * *", [], ["2024-03-01T08:00", "2024-03-01T07:00"]),
    ],
)
def test_between_two_expressions(start: str, end: str, inside: list[str], outside: list[str]) -> None:
    assert all(is_between(start, end, wall_s(at)) for at in inside)
    assert not any(is_between(start, end, wall_s(at)) for at in outside)


@given(st.integers(0, 200 * 365), st.integers(1, 31), st.integers(1, 12), st.integers(0, 6))
def test_days_are_those_of_the_calendar(day: int, date: int, month: int, weekday: int) -> None:
    there = datetime.fromtimestamp(day * DAY_S, UTC)
    assert (cron(f"0 0 {date} * *").latest(day, 0) == 0) == (there.day == date)
    assert (cron(f"0 0 * {month} *").latest(day, 0) == 0) == (there.month == month)
    assert (cron(f"0 0 * * {weekday}").latest(day, 0) == 0) == (there.isoweekday() % 7 == weekday)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 8 * *", "five fields"),
        ("60 8 * * *", "minutes from 0 to 59"),
        ("0 8-6 * * *", "hours from 0 to 23"),
        ("0 8 0 * *", "dates from 1"),
        ("0 8 * jam *", "months from 1"),
        ("0 8 * * mon/fri", "weekdays"),
        ("0 */0 * * *", "hours"),
        ("0 8, * * *", "hours"),
        ("+1 8 * * *", "minutes"),
        ("0 0 31 feb,apr *", "a day that its months have"),
    ],
)
def test_an_invalid_expression_says_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        cron(text)
