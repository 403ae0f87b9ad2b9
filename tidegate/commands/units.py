"""Values with units: durations and instants as users type them, and what tables print."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta

import click

from policy.duration import parse_duration

# An instant without seconds means the whole minute, one with seconds the whole second.
_CLOCK = re.compile(r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?P<second>:\d{2})?")
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?P<second>:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:\d{2})?")


def duration(text: str) -> float:
    """Seconds of ``90s``, ``30m``, ``2h``, ``1h30m``, ``1d``; ``BadParameter`` also without a unit."""
    if not (seconds := parse_duration(text)):
        raise click.BadParameter(f"invalid duration {text!r}: use e.g. 90s, 30m, 2h")
    return seconds


def moment(text: str) -> float:
    """:func:`instant` relative to the present."""
    return instant(text, time.time())


def beginning(text: str) -> float:
    """As :func:`moment`, but where the minute or second begins: what happened within it is after that."""
    return instant(text, time.time(), begins=True)


def instant(text: str, now: float, *, begins: bool = False) -> float:
    """The end of the minute or second that ``text`` names, in Unix seconds, at most ``now``.

    With ``begins`` it is the beginning.
    Formats: ``12:03`` (the latest such time of day), ``12:03:20``, an ISO timestamp (local time without a
    zone), ``5m ago`` and ``now``. Raises :class:`click.BadParameter` for anything else, and for the future.
    """
    text = text.strip()
    if text == "now":
        return now
    if text.endswith(" ago") and (seconds := parse_duration(text.removesuffix(" ago"))):
        return now - seconds
    try:
        if match := _CLOCK.fullmatch(text):
            begin = _latest(match, now)
        elif match := _ISO.fullmatch(text):
            begin = datetime.fromisoformat(text).astimezone().timestamp()
        else:
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"invalid time {text!r}: use e.g. 12:03, 12:03:20, 2026-03-01T12:03 or '5m ago'"
        ) from None
    if begin > now:
        raise click.BadParameter(f"{text!r} is in the future")
    return begin if begins else min(now, begin + (1 if match["second"] else 60) - 1e-3)


def _latest(time_of_day: re.Match[str], now: float) -> float:
    """The latest instant with this local time of day; raises :class:`ValueError` for an impossible one."""
    hour, minute = int(time_of_day["hour"]), int(time_of_day["minute"])
    second = int((time_of_day["second"] or ":0")[1:])
    today = datetime.fromtimestamp(now).replace(hour=hour, minute=minute, second=second, microsecond=0)
    return (today if today.timestamp() <= now else today - timedelta(days=1)).timestamp()


def optional(value: float | None, text: Callable[[float], str]) -> str | None:
    """``text`` of a value, if there is one."""
    return None if value is None else text(value)


def clock(at: float, now: float) -> str:
    """The local time of day of an instant, with the date if it is not today's."""
    then = datetime.fromtimestamp(at)
    same = then.date() == datetime.fromtimestamp(now).date()
    return then.strftime("%H:%M:%S" if same else "%Y-%m-%d %H:%M:%S")


def age(seconds: float) -> str:
    """A duration in its two largest units."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def rate(per_s: float) -> str:
    """Requests per second, with three significant digits up to 100."""
    return f"{per_s:.2f}/s" if per_s < 10 else f"{per_s:.1f}/s"


def latency(seconds: float) -> str:
    """A latency, in milliseconds below one second."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def size(size_bytes: float) -> str:
    """Bytes, in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def plural(count: int, noun: str) -> str:
    """A count with its noun: ``1 replica``, ``2 replicas``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
