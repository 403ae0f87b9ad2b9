"""The periods of budgets: ``12h``, ``7d``, ``1mo`` and other periods, in UTC; without one, forever.

Periods begin at multiples of their length since 1970: those of days at midnight, whole weeks on Monday,
months on their first day, 3mo with a quarter. So they end at one instant on all hosts, whenever set.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from policy.duration import PERIOD, parse_period

_DAY_S = 86_400
# 1970-01-05 was a Monday.
_MONDAY_S = 4 * _DAY_S


class BudgetPeriod(NamedTuple):
    """From ``begin`` to before ``end``, in Unix seconds."""

    begin: float
    end: float


FOREVER = BudgetPeriod(0.0, inf)


def period_of(duration: str | None, now: float) -> BudgetPeriod:
    """The period of ``duration`` that holds the instant ``now`` (Unix seconds); raises ``ValueError``."""
    if duration is None:
        return FOREVER
    length, months = parse_period(duration)
    if months:
        month = _month_of(int(now // _DAY_S)) // months * months
        return BudgetPeriod(_first_day(month) * float(_DAY_S), _first_day(month + months) * float(_DAY_S))
    if not length:
        raise ValueError(f"{duration!r} is no period: expected {PERIOD}")
    origin = _MONDAY_S if length % (7 * _DAY_S) == 0 else 0
    begin = (now - origin) // length * length + origin
    return BudgetPeriod(begin, begin + length)


def _month_of(day: int) -> int:
    """Months from January of year 0 to the day that is ``day`` days after 1970-01-01.

    The civil calendar in eras of 400 years, from Howard Hinnant's "chrono-compatible low-level date
    algorithms".
    """
    shifted = day + 719_468
    era, of_era = divmod(shifted, 146_097)
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    march = (5 * of_year + 2) // 153
    return (era * 400 + year) * 12 + march + 2


def _first_day(month: int) -> int:
    """Days from 1970-01-01 to the first of ``month``, counted as by :func:`_month_of`."""
    year, march = divmod(month - 2, 12)
    era, of_era = divmod(year, 400)
    days = of_era * 365 + of_era // 4 - of_era // 100 + (153 * march + 2) // 5
    return era * 146_097 + days - 719_468
