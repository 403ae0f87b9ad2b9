"""The goodput of each contender over time as an SVG, over the modes that the load chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from sim.benchmarks.modes import WINDOW_S, Trial
from sim.charts.axis import Scale, linear, times
from sim.results.series import Dwell, clock
from sim.twin.record import Floats

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 320, 48, 12, 66, 26
# The first is the one whose mode follows the load, and drawn last, on top of the others.
COLOURS = ("#0b6e99", "#d9822b", "#7a5195", "#5b8c5a")
TINTS = ("#eef4f7", "#fbf0e2", "#f1ebf5", "#edf3ed")


def curves(title: str, trials: Mapping[str, Trial]) -> str:
    """The SVG of one trial of each contender; tints are the modes of the first."""
    first = next(iter(trials.values()))
    until = max(trial.ends_at for trial in trials.values())
    x = Scale(0.0, until, LEFT, WIDTH - RIGHT)
    y = linear(max(float(trial.curve.max()) for trial in trials.values()), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
        *_stays(first.stays, x),
        *_axes(x, y),
    ]
    left = float(LEFT)
    for row, name in enumerate(trials):
        colour, said = COLOURS[row % len(COLOURS)], name.replace("_", " ")
        parts += [
            f'<rect x="{left:.0f}" y="31" width="14" height="4" fill="{colour}"/>',
            f'<text x="{left + 18:.0f}" y="37">{escape(said)}</text>',
        ]
        left += 40 + 7 * len(said)
    for row, trial in reversed(list(enumerate(trials.values()))):
        parts.append(
            f'<path d="{_path(trial.curve, x, y)}" fill="none" stroke="{COLOURS[row % len(COLOURS)]}" '
            f'stroke-width="{1.2 if row else 2}"/>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _stays(stays: Sequence[Dwell], x: Scale) -> list[str]:
    modes = list(dict.fromkeys(stay.mode for stay in stays))
    parts = []
    for stay in stays:
        start, end = x(stay.start), x(stay.end)
        tint = TINTS[modes.index(stay.mode) % len(TINTS)]
        parts += [
            f'<rect x="{start:.1f}" y="{TOP}" width="{end - start:.1f}" height="{HEIGHT - TOP - BOTTOM}" '
            f'fill="{tint}"/>',
            f'<text x="{start + 3:.1f}" y="{TOP - 6}" fill="#555">{escape(stay.mode)}</text>',
        ]
    return parts


def _axes(x: Scale, y: Scale) -> list[str]:
    parts = []
    for value in y.ticks(5):
        at = y(value)
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#d5dade"/>',
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>',
        ]
    for value in times(x.high):
        parts.append(f'<text x="{x(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{clock(value)}</text>')
    return parts


def _path(curve: Floats, x: Scale, y: Scale) -> str:
    points = (f"{x((i + 0.5) * WINDOW_S):.1f},{y(float(value)):.1f}" for i, value in enumerate(curve))
    return "M" + " ".join(points)
