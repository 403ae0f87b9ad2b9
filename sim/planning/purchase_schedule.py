"""When to add what: devices come in modules, some weeks after they were ordered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

# A month is a twelfth of 365.25 days.
WEEKS_PER_MONTH = 365.25 / 12 / 7


class Need(NamedTuple):
    """At ``factor`` times today's load so many ``devices`` are needed."""

    factor: float
    devices: int


class Addition(msgspec.Struct, frozen=True, kw_only=True):
    """``modules`` that serve from month ``month`` on, when the load is ``factor`` times today's.

    They have to be ordered in month ``order_month``, which is before today where it is negative. With them
    there are ``devices``.
    """

    month: float
    order_month: float
    factor: float
    modules: int
    devices: int


def schedule(needs: Sequence[Need], growth: float, module: int, lead_weeks: float) -> list[Addition]:
    """What to add while the load grows by ``growth`` a month, compounded, until the last of ``needs``.

    ``needs`` begin with today's, at a factor of 1, and are in the order of their factors: between two of them
    the devices that are needed are taken to grow on a line. The first addition is what is needed today.
    """

    def addition(month: float, factor: float, modules: int, owned: int) -> Addition:
        return Addition(
            month=month,
            order_month=month - lead_weeks / WEEKS_PER_MONTH,
            factor=factor,
            modules=modules,
            devices=owned * module,
        )

    owned = _modules(needs[0].devices, module)
    found = [addition(0.0, 1.0, owned, owned)]
    while owned < _modules(max(need.devices for need in needs), module):
        factor = _outgrown(needs, owned * module)
        owned += 1
        found.append(addition(math.log(factor) / math.log1p(growth), factor, 1, owned))
    return found


def _modules(devices: int, module: int) -> int:
    return math.ceil(devices / module)


def _outgrown(needs: Sequence[Need], devices: int) -> float:
    """The load beyond which more than ``devices`` are needed."""
    for before, after in itertools.pairwise(needs):
        if after.devices > devices:
            part = (devices - before.devices) / (after.devices - before.devices)
            return before.factor + part * (after.factor - before.factor)
    raise ValueError(f"{devices} devices are never outgrown")
