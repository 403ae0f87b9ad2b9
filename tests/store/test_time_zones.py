"""The time of day by time zone, across a change of the clock."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from store.time_zones import is_time_zone, wall_clock_s


@pytest.mark.parametrize(
    ("zone", "at", "there"),
    [
        ("UTC", "2024-03-31T00:59", "2024-03-31T00:59"),
        ("Europe/Berlin", "2024-03-31T00:59", "2024-03-31T01:59"),
        ("Europe/Berlin", "2024-03-31T01:00", "2024-03-31T03:00"),
        ("Asia/Kolkata", "2024-03-31T01:00", "2024-03-31T06:30"),
    ],
)
def test_the_wall_clock_of_a_zone(zone: str, at: str, there: str) -> None:
    instant, wall = (datetime.fromisoformat(each).replace(tzinfo=UTC).timestamp() for each in (at, there))
    assert wall_clock_s(zone, instant) == wall


def test_only_names_of_zones_are_zones() -> None:
    assert is_time_zone("America/New_York")
    assert not any(is_time_zone(name) for name in ("Mars/Base", "", "../etc/passwd", "/etc/localtime"))
