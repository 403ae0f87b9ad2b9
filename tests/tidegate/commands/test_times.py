"""Times as people write them, read as they mean them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.commands.durations import clock, instant, parse_duration


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A zone of its own, so that local times and UTC cannot be taken for each other."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("30min", 1800),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1d", 86_400),
        ("0.5h", 1800),
    ],
)
def test_a_term_is_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "30x", "30m later", "-5m", "0s", "1h30"])
def test_what_is_no_term(text: str) -> None:
    assert not parse_duration(text)


@given(st.integers(1, 99), st.integers(1, 59), st.integers(1, 59))
def test_parts_of_a_term_add_up(hours: int, minutes: int, seconds: int) -> None:
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


NOW = "2026-07-10T14:30:10"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("12:03", "2026-07-10T12:03:59.999"),
        ("9:05", "2026-07-10T09:05:59.999"),
        ("12:03:20", "2026-07-10T12:03:20.999"),
        # The minute that is not over yet ends now.
        ("14:30", NOW),
        # Later than now is yesterday's.
        ("14:31", "2026-07-09T14:31:59.999"),
        ("2026-07-08T12:03", "2026-07-08T12:03:59.999"),
        ("2026-07-08 12:03", "2026-07-08T12:03:59.999"),
        ("2026-07-08T12:03:20", "2026-07-08T12:03:20.999"),
        ("2026-07-08T10:03:20Z", "2026-07-08T12:03:20.999"),
        ("2026-07-08T10:03:20+00:00", "2026-07-08T12:03:20.999"),
        ("2026-07-08T10:03+00:00", "2026-07-08T12:03:59.999"),
        ("2026-01-08T12:03", "2026-01-08T12:03:59.999"),
        ("5m ago", "2026-07-10T14:25:10"),
        ("1h30m ago", "2026-07-10T13:00:10"),
        ("now", NOW),
    ],
)
def test_an_instant_is_the_end_of_what_is_named(text: str, moment: str) -> None:
    assert instant(text, at(NOW)) == pytest.approx(at(moment), abs=1e-4)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("noon", "is no time"),
        ("25:00", "is no time"),
        ("12:3", "is no time"),
        ("ago", "is no time"),
        ("5 ago", "is no time"),
        ("2026-07-11T12:03", "yet to come"),
    ],
)
def test_what_is_no_instant(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        instant(text, at(NOW))


def test_an_instant_of_another_day_has_its_date() -> None:
    assert clock(at("2026-07-10T12:03:20"), at(NOW)) == "12:03:20"
    assert clock(at("2026-07-09T12:03:20"), at(NOW)) == "2026-07-09 12:03:20"
