"""Durations and instants as users type them, and the formats of tables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import click
import pytest

from tidegate.commands.units import age, clock, duration, instant, latency, rate, size


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_an_invalid_duration_shows_examples() -> None:
    with pytest.raises(click.BadParameter, match="invalid duration '5': use e\\.g\\. 90s"):
        duration("5")


NOW = "2026-07-10T14:30:10"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("12:03", "2026-07-10T12:03:59.999"),
        ("9:05", "2026-07-10T09:05:59.999"),
        ("12:03:20", "2026-07-10T12:03:20.999"),
        # The present minute ends now.
        ("14:30", NOW),
        # A later time of day is yesterday's.
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
def test_an_instant_is_the_end_of_its_minute_or_second(text: str, moment: str) -> None:
    assert instant(text, at(NOW)) == pytest.approx(at(moment), abs=1e-4)


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("12:03", "2026-07-10T12:03:00"),
        ("12:03:20", "2026-07-10T12:03:20"),
        ("14:31", "2026-07-09T14:31:00"),
        ("2026-07-08T10:03+00:00", "2026-07-08T12:03:00"),
        ("5m ago", "2026-07-10T14:25:10"),
        ("now", NOW),
    ],
)
def test_an_instant_may_be_the_beginning_of_its_minute_or_second(text: str, begin: str) -> None:
    assert instant(text, at(NOW), begins=True) == at(begin)


@pytest.mark.parametrize("text", ["noon", "25:00", "12:3", "ago", "5 ago", "2026-07-11T12:03"])
def test_invalid_and_future_instants(text: str) -> None:
    why = "in the future" if "T" in text else "invalid time"
    with pytest.raises(click.BadParameter, match=why):
        instant(text, at(NOW))


def test_an_instant_of_another_day_is_shown_with_its_date() -> None:
    assert clock(at("2026-07-10T12:03:20"), at(NOW)) == "12:03:20"
    assert clock(at("2026-07-09T12:03:20"), at(NOW)) == "2026-07-09 12:03:20"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((age(9.94), "9.9 s"), (age(59), "59 s"), (age(61), "1 min 1 s"), (age(3661), "1 h 1 min")),
        *((age(90_000), "1 d 1 h"), (age(-1), "0.0 s")),
        *((rate(1.2345), "1.23/s"), (rate(12.345), "12.3/s")),
        *((latency(0.0411), "41 ms"), (latency(0.9996), "1.00 s"), (latency(1.318), "1.32 s")),
        *((size(900), "900 B"), (size(1_500_000), "1.5 MB"), (size(2e9), "2.0 GB")),
    ],
)
def test_formats_round_and_have_units(text: str, expected: str) -> None:
    assert text == expected
