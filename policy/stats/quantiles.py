"""Quantiles of a list of values: by nearest rank, and with linear interpolation."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil


def nearest_rank(values: Iterable[float], q: float) -> float:
    """The smallest value that at least the fraction ``q`` (0..1) of ``values`` do not exceed.

    Raises :class:`ValueError` without values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[min(len(ordered) - 1, max(0, ceil(q * len(ordered)) - 1))]


def interpolated(values: Iterable[float], q: float) -> float:
    """The quantile ``q`` (0..1) with linear interpolation between ranks (numpy's default, type 7).

    Raises :class:`ValueError` without values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    rank = q * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
