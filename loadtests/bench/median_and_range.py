"""Figures of measurements: medians with their ranges, slopes, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec


class MedianAndRange(msgspec.Struct, frozen=True):
    """One number of a table: the median over rounds, and the lowest and highest round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> MedianAndRange:
        """The figure of ``rounds``, at least one of them."""
        return cls(statistics.median(rounds), min(rounds), max(rounds))

    def times(self, factor: float) -> MedianAndRange:
        """The same in another unit."""
        return MedianAndRange(self.median * factor, self.low * factor, self.high * factor)

    def text(self, digits: int = 0, scale: float = 1.0) -> str:
        """``median (low-high)``, times ``scale``."""
        scaled = self.times(scale)
        middle, low, high = (f"{each:.{digits}f}" for each in (scaled.median, scaled.low, scaled.high))
        return middle if low == high else f"{middle} ({low}-{high})"


def medians_and_ranges(rounds: Sequence[Mapping[str, float]]) -> dict[str, MedianAndRange]:
    """The figure of each quantity that was measured in every round."""
    return {name: MedianAndRange.of([each[name] for each in rounds]) for name in rounds[0]}


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """How much ``ys`` rise for one unit of ``xs``: least squares (0 for fewer than two points)."""
    if len(xs) < 2:
        return 0.0
    return statistics.linear_regression(xs, ys).slope


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
