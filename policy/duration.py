"""Durations as people write them: ``90s``, ``1h30m``, ``7d``; periods may also be months, ``1mo``."""

from __future__ import annotations

import re

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(s|min|m|h|d)\s*")
_MONTHS = re.compile(r"([1-9][0-9]{0,4})mo")
_LONGEST_PERIOD_S = 1e11

DURATION = "a duration such as 90s, 1h30m or 30d"
PERIOD = "whole seconds such as 12h, 1h30m or 7d, or months such as 1mo"


def parse_duration(text: str) -> float:
    """The seconds of a duration, 0 if it is invalid or has no unit."""
    position, seconds = 0, 0.0
    while part := _PART.match(text, position):
        seconds += float(part[1]) * _UNITS[part[2]]
        position = part.end()
    return seconds if position == len(text) else 0.0


def parse_period(text: str) -> tuple[int, int]:
    """The whole seconds and the months of a period, of which one is 0; both are for one that is invalid."""
    if months := _MONTHS.fullmatch(text):
        return 0, int(months[1])
    seconds = parse_duration(text)
    whole = seconds == seconds // 1 and seconds <= _LONGEST_PERIOD_S
    return int(seconds) if whole else 0, 0
