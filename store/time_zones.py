"""The time of day by time zone, from the system's time zone database or the package ``tzdata``."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError


def is_time_zone(name: str) -> bool:
    """Whether ``name`` is a time zone, such as ``Europe/Berlin``."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def wall_clock_s(zone: str, at: float) -> float:
    """The time of ``zone`` at ``at`` (Unix seconds), in seconds since 1970-01-01 00:00 on its wall clock."""
    offset = datetime.fromtimestamp(at, ZoneInfo(zone)).utcoffset()
    return at + (offset.total_seconds() if offset is not None else 0.0)
