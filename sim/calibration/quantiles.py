"""Quantiles that were measured live beside those of the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Pair(msgspec.Struct, frozen=True):
    """One quantile: seconds ``live`` and in the ``twin``, whose relative ``error`` is signed."""

    live: float
    twin: float
    error: float


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles by measure and name, and the numbers of requests served ``live`` and in the ``twin``."""

    live: int
    twin: int
    quantiles: dict[str, dict[str, Pair]]


def compare(
    live: Mapping[str, Sequence[float]], twin: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, Pair]]:
    """The quantiles of each measure in both; one of which either has nothing but NaN is left out."""
    found: dict[str, dict[str, Pair]] = {}
    for measure in live:
        one, other = known(live[measure]), known(twin[measure])
        if one.size and other.size:
            found[measure] = {
                name: _pair(float(np.quantile(one, part)), float(np.quantile(other, part)))
                for name, part in QUANTILES.items()
            }
    return found


def known(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Those that are numbers, sorted."""
    given = np.asarray(values, dtype=np.float64)
    return np.sort(given[~np.isnan(given)])


def _pair(live: float, twin: float) -> Pair:
    # Under a microsecond neither clock tells them apart.
    return Pair(live, twin, twin / live - 1.0 if live > 1e-6 else 0.0)
