"""Cron expressions, and whether a time is between those of two of them.

Expressions are those of crontab(5): minute, hour, day of month, month and day of week, with ``*``, lists,
ranges, steps and English names. Times are those of a wall clock, as seconds since 1970-01-01 00:00 on it, so
that a journal replays without a database of time zones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
# Name, least and greatest value of each field, and the names of its values.
_FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("date", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("weekday", 0, 7, _WEEKDAYS),
)
_LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_MINUTES = 24 * 60
# The 29th of February is missing for eight years at most.
_LONGEST_DAYS = 8 * 366


class CronSchedule(NamedTuple):
    """The values of each field. With ``either`` a day matches by its date or by its weekday, else by both."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either: bool

    def latest(self, day: int, until: int) -> int:
        """The last minute of ``day`` (days since 1970) that matches, at most ``until``; -1 without one."""
        month, date = _month_and_date(day)
        by_date, by_weekday = date in self.days, (day + 4) % 7 in self.weekdays
        matches = by_date or by_weekday if self.either else by_date and by_weekday
        if month not in self.months or not matches:
            return -1
        times = (60 * hour + minute for hour in self.hours for minute in self.minutes)
        return max((time for time in times if time <= until), default=-1)


def is_between(start: str, end: str, wall_s: float) -> bool:
    """Whether the last time of ``start`` is later than that of ``end``, at ``wall_s``.

    Raises :class:`ValueError` for an invalid expression.
    """
    begins, ends = cron(start), cron(end)
    today, minute = divmod(int(wall_s // 60), _MINUTES)
    for day in range(today, today - _LONGEST_DAYS, -1):
        until = minute if day == today else _MINUTES
        begun, ended = begins.latest(day, until), ends.latest(day, until)
        if begun >= 0 or ended >= 0:
            return begun > ended
    return False


@lru_cache(maxsize=256)
def cron(text: str) -> CronSchedule:
    """The expression ``text``; raises :class:`ValueError`, which says what is wrong."""
    fields = text.lower().split()
    if len(fields) != len(_FIELDS):
        raise ValueError(f"five fields ({', '.join(name for name, *_ in _FIELDS)}), as in '0 8 * * mon-fri'")
    values = [
        frozenset().union(*(_values(part, *kind) for part in field.split(",")))
        for field, kind in zip(fields, _FIELDS, strict=True)
    ]
    minutes, hours, days, months, weekdays = values
    # Two day fields that are both restricted are alternatives. A step restricts, as in Kubernetes and KEDA.
    either = not {fields[2], fields[4]} & {"*", "*/1"}
    if not either and all(min(days) > _LONGEST_MONTHS[month - 1] for month in months):
        raise ValueError("a day that its months have")
    return CronSchedule(minutes, hours, days, months, frozenset(day % 7 for day in weekdays), either)


def _values(part: str, name: str, least: int, most: int, names: tuple[str, ...]) -> range:
    """The values of one ``part`` of a list: ``*``, a value or a range, with an optional step."""
    span, slash, step = part.partition("/")
    begin, dash, end = span.partition("-")

    def value(word: str) -> int:
        if word in names:
            return names.index(word) + least
        return int(word) if word.isascii() and word.isdecimal() else -1

    first = least if span == "*" else value(begin)
    last = most if span == "*" or (slash and not dash) else value(end if dash else begin)
    by = value(step) if slash else 1
    if not least <= first <= last <= most or by < 1 or (slash and step in names):
        expected = f"{name}s from {least} to {most}, ranges or lists of them"
        raise ValueError(f"{expected} (got {part!r})")
    return range(first, last + 1, by)


def _month_and_date(day: int) -> tuple[int, int]:
    """The month and the day of month, ``day`` days after 1970-01-01 in the Gregorian calendar.

    After Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", ``civil_from_days``.
    """
    of_era = (day + 719_468) % 146_097
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    return month + 3 if month < 10 else month - 9, of_year - (153 * month + 2) // 5 + 1
