"""Shares of a limit between hosts: each has a lease on one, and all together are at most 1.

A host only gives what is its own: it makes its share smaller when others ask for more, and takes what is
free. So no two hosts need to act at one instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Demand is forgotten with this time constant.
MEMORY_S = 5.0
# Less than a request in a hundred seconds is none.
LEAST_DEMAND = 0.01
# A smaller difference is not worth a change.
LEAST_CHANGE = 0.02
# What a host keeps for a client that comes back, while it is known to use the limit at all.
LEAST_SHARE = 0.05


class LimitLeaseHolder(NamedTuple):
    """A host with a lease that has not ended: its share, and the requests a second that it was asked for."""

    share: float
    demand: float


def decayed(demand: float, asked: int, elapsed_s: float) -> float:
    """The mean requests a second, after ``asked`` more of them in ``elapsed_s`` seconds."""
    weight = min(1.0, elapsed_s / MEMORY_S)
    mean = demand + weight * (asked / max(elapsed_s, 1e-3) - demand)
    return mean if mean >= LEAST_DEMAND else 0.0


def next_share(mine: LimitLeaseHolder, others: Sequence[LimitLeaseHolder]) -> float:
    """The share of the limit that a host holds from now on."""
    free = max(0.0, 1.0 - mine.share - sum(other.share for other in others))
    wanting = [other for other in others if other.demand > 0.0]
    total = mine.demand + sum(other.demand for other in wanting)
    if total <= 0.0:
        target = mine.share
    elif not wanting:
        target = 1.0
    else:
        fair = mine.demand / total
        target = min(max(fair, LEAST_SHARE), 1.0 - LEAST_SHARE * len(wanting)) if mine.demand > 0.0 else 0.0
    allowed = min(target, mine.share + free)
    if abs(allowed - mine.share) < LEAST_CHANGE and 0.0 < allowed < 1.0 and mine.share > 0.0:
        return min(mine.share, 1.0)
    return max(0.0, allowed)
