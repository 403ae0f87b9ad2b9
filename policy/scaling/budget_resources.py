"""Amounts of the budgeted resources: GPUs, cores, watts and money."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

from policy.config.deployment import ResourceBudget

# The count that fits where a replica needs none of the bounded resources: only its mode bounds it.
UNBOUNDED = 1 << 30
# Watts and prices are sums of fractions: a billionth of a replica may be missing.
ROUNDING = 1e-9


class Resources(NamedTuple):
    """An amount of each budgeted resource; infinite where it is unbounded."""

    gpus: float = 0.0
    cpus: float = 0.0
    watts: float = 0.0
    cost_per_h: float = 0.0

    def plus(self, other: Resources, times: float = 1) -> Resources:
        """This plus ``times`` the other."""
        return Resources(*(mine + times * its for mine, its in zip(self, other, strict=True)))

    def most(self, other: Resources) -> Resources:
        """The larger of both, per resource."""
        return Resources(*map(max, self, other))

    def holds(self, each: Resources) -> int:
        """How many replicas that need ``each`` fit into it."""
        fits = [
            math.floor(min(max(left, 0.0) / one + ROUNDING, UNBOUNDED))
            for left, one in zip(self, each, strict=True)
            if one > 0 and left < math.inf
        ]
        return max(0, min(fits, default=UNBOUNDED))


def total(budget: ResourceBudget) -> Resources:
    """The whole budget."""
    bounds = (budget.gpus, budget.cpus, budget.watts, budget.cost_per_h)
    return Resources(*(math.inf if bound is None else float(bound) for bound in bounds))


def summed(amounts: Iterable[Resources]) -> Resources:
    """The sum of ``amounts``."""
    return reduce(Resources.plus, amounts, Resources())
