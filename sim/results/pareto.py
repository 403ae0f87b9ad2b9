"""Fronts of attainment against GPU-hours: a policy is judged at the setting that suits the question.

One number for a policy would judge its setting as much as the policy. So each is run at every rung of a
ladder (:mod:`sim.results.sweeps`), and fronts are compared where they attain the same. Between two runs of a
front any mean of them can be had by taking each for a part of the time, so what lies on the straight line
between them counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple


class Point(NamedTuple):
    """What one ``setting`` of a policy attained (0..1), and the GPU-hours that it took."""

    attainment: float
    gpu_hours: float
    setting: str = ""


def front(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other one dominates, which attains as much for as few hours; the cheapest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (each.gpu_hours, -each.attainment)):
        if not best or point.attainment > best[-1].attainment:
            best.append(point)
    return tuple(best)


def hours_at(points: Sequence[Point], attainment: float) -> float | None:
    """The fewest GPU-hours for that attainment, on the lines between points; ``None`` where none attains it.

    What attains more than is asked for may be the cheapest there is: nothing is drawn on beyond the points.
    """
    enough = [point.gpu_hours for point in points if point.attainment >= attainment]
    if not enough:
        return None
    least = min(enough)
    # Lines between any two points: a front may be dented, and a mean of its outer ones then is cheaper.
    ranked = sorted(points)
    for i, low in enumerate(ranked):
        for high in ranked[i + 1 :]:
            if low.attainment < attainment < high.attainment:
                part = (attainment - low.attainment) / (high.attainment - low.attainment)
                least = min(least, low.gpu_hours + part * (high.gpu_hours - low.gpu_hours))
    return least


def dominates(ours: Sequence[Point], theirs: Sequence[Point], at: float = 0.99) -> bool:
    """Whether ours attain ``at`` for fewer GPU-hours than theirs, or theirs never do."""
    own, other = hours_at(ours, at), hours_at(theirs, at)
    return own is not None and (other is None or own < other)


def averaged(by_seed: Mapping[int, Sequence[Point]]) -> tuple[Point, ...]:
    """The mean of each setting over the seeds; raises :class:`ValueError` where a seed lacks a setting."""
    settings = [[point.setting for point in points] for points in by_seed.values()]
    for seed, found in zip(by_seed, settings, strict=True):
        if found != settings[0]:
            raise ValueError(f"seed {seed} was run at {found}, expected {settings[0]} as for the others")
    return tuple(
        Point(
            fmean(point.attainment for point in same),
            fmean(point.gpu_hours for point in same),
            same[0].setting,
        )
        for same in zip(*by_seed.values(), strict=True)
    )


def ratios(
    ours: Mapping[int, Sequence[Point]], theirs: Mapping[int, Sequence[Point]], at: float = 0.99
) -> dict[int, float | None]:
    """Our GPU-hours over theirs by seed, both at the attainment ``at``; ``None`` where one never attains it.

    Both saw the same arrivals in a seed, so the spread of the ratios has nothing of theirs. Raises
    :class:`ValueError` where the seeds differ.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(f"seeds {sorted(ours)} and {sorted(theirs)}: expected the same, to compare in pairs")
    found: dict[int, float | None] = {}
    for seed in ours:
        own, other = hours_at(ours[seed], at), hours_at(theirs[seed], at)
        found[seed] = None if own is None or other is None else own / other
    return found
