"""Times as people write them: terms such as 30m, and instants such as 12:03."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta

import click

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)\s*")
# Whether seconds are written decides how long what is named lasts.
_CLOCK = re.compile(r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?P<second>:\d{2})?")
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?P<second>:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:\d{2})?")


def duration(text: str) -> float:
    """A duration with its unit, in seconds: ``90s``, ``30m``, ``2h``, ``1h30m``, ``1d``.

    Raises :class:`click.BadParameter`, also where the unit is missing: 30 might be either.
    """
    if not (seconds := parse_duration(text)):
        raise click.BadParameter(f"{text!r} is no term: expected such as 90s, 30m, 2h or 1h30m")
    return seconds


def moment(text: str) -> float:
    """What :func:`instant` makes of ``text`` now; raises :class:`click.BadParameter`."""
    try:
        return instant(text, time.time())
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def parse_duration(text: str) -> float:
    """The seconds of a term, 0 if it is none."""
    position, seconds = 0, 0.0
    while found := _PART.match(text, position):
        seconds += float(found[1]) * _UNITS[found[2]]
        position = found.end()
    return seconds if position == len(text) else 0.0


def instant(text: str, now: float) -> float:
    """The last moment of what ``text`` names, in Unix seconds, and not after ``now``.

    ``12:03`` (the last time that the clock showed it), ``12:03:20``, an ISO instant, which is of this
    machine's zone if it names none, ``5m ago`` and ``now``. Raises :class:`ValueError` for anything else, and
    for what is yet to come.
    """
    text = text.strip()
    if text == "now":
        return now
    if text.endswith(" ago") and (term := parse_duration(text.removesuffix(" ago"))):
        return now - term
    try:
        if found := _CLOCK.fullmatch(text):
            begin = _last(found, now)
        elif found := _ISO.fullmatch(text):
            begin = datetime.fromisoformat(text).astimezone().timestamp()
        else:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: expected such as 12:03, 12:03:20, 2026-03-01T12:03 or '5m ago'"
        ) from None
    if begin > now:
        raise ValueError(f"{text!r} is yet to come")
    return min(now, begin + (1 if found["second"] else 60) - 1e-3)


def _last(found: re.Match[str], now: float) -> float:
    """When the clock of this machine last showed it; raises :class:`ValueError` if it never does."""
    hour, minute, second = int(found["hour"]), int(found["minute"]), int((found["second"] or ":0")[1:])
    today = datetime.fromtimestamp(now).replace(hour=hour, minute=minute, second=second, microsecond=0)
    return (today if today.timestamp() <= now else today - timedelta(days=1)).timestamp()


def clock(at: float, now: float) -> str:
    """An instant in words: the time of day, with the date where it is another."""
    then = datetime.fromtimestamp(at)
    same = then.date() == datetime.fromtimestamp(now).date()
    return then.strftime("%H:%M:%S" if same else "%Y-%m-%d %H:%M:%S")
