"""Whole replicas in layers: the first is there while one is needed, the second while two are, and so on.

A layer that is not needed for a gap of ``g`` seconds costs ``g`` when it stays, and the lead ``L`` when it is
stopped and started again in time: so it stays iff ``g <= L``. Layers do not depend on each other, so no plan
for the same needs costs less.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.oracle.problem import ROUNDING
from sim.twin.record import Floats, Ints


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of replicas from each of the instants ``at`` (seconds) on, those that start included.

    The first instant is 0. ``replica_s`` are the seconds of all replicas until ``ends_at``, leads included.
    """

    at: tuple[float, ...]
    counts: tuple[int, ...]
    ends_at: float
    replica_s: float

    @property
    def mean(self) -> float:
        """How many replicas there are on average."""
        return self.replica_s / self.ends_at

    def count_at(self, at: float) -> int:
        """How many replicas there shall be at the instant ``at``, those that start included."""
        return self.counts[max(0, bisect_right(self.at, at) - 1)]

    def most_within(self, at: float, for_s: float) -> int:
        """The most that there shall be from the instant ``at`` until before ``for_s`` seconds later."""
        first = max(0, bisect_right(self.at, at) - 1)
        return max(self.counts[first : max(first + 1, bisect_left(self.at, at + for_s))])


def plan_layers(needs: Ints, bin_s: float, lead_s: float) -> Plan:
    """The cheapest plan in which the needed replicas are ready in each bin of ``bin_s`` seconds."""
    changes: Counter[float] = Counter({0.0: 0})
    for layer in range(1, int(needs.max()) + 1):
        for begins, ends in _stays(needs >= layer, bin_s, lead_s):
            changes[begins] += 1
            changes[ends] -= 1
    ends_at = len(needs) * bin_s
    at = sorted(instant for instant in changes if instant < ends_at)
    counts = np.cumsum([changes[instant] for instant in at])
    return Plan(
        at=tuple(at),
        counts=tuple(int(count) for count in counts),
        ends_at=ends_at,
        replica_s=replica_seconds(needs, bin_s, lead_s),
    )


def replica_seconds(needs: Ints, bin_s: float, lead_s: float) -> float:
    """What the cheapest plan takes, in seconds of replicas: the needs, and of each gap ``min(g, L)``."""
    layers = np.arange(int(needs.max()))[:, None]
    row, begins = np.nonzero(np.diff(needs > layers, axis=1, prepend=False) & (needs > layers))
    _, ends = np.nonzero(np.diff(needs > layers, axis=1, append=False) & (needs > layers))
    # Before the first stretch of a layer the gap is from 0 on.
    before = np.where(np.diff(row, prepend=-1) > 0, 0, np.roll(ends + 1, 1))
    gaps = np.minimum((begins - before) * bin_s, lead_s)
    return float(needs.sum() * bin_s + gaps.sum())


def dropped(load: Floats, needs: Ints) -> float:
    """What of the ``load``, in full replicas, so many replicas leave; in replicas times bins."""
    return float(np.maximum(load - needs, 0.0).sum())


def _stays(needed: NDArray[np.bool_], bin_s: float, lead_s: float) -> list[tuple[float, float]]:
    """From when to when a layer is held: from ``lead_s`` before it is needed, through gaps of up to that."""
    edges = np.flatnonzero(np.diff(needed, prepend=False, append=False)) * bin_s
    held: list[tuple[float, float]] = []
    for begins, ends in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        before = held[-1][1] if held else 0.0
        if begins - before <= lead_s + ROUNDING:
            held[-1:] = [(held[-1][0] if held else 0.0, ends)]
        else:
            held.append((begins - lead_s, ends))
    return held
