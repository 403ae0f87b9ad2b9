"""The fronts of a contest as an SVG: what share was attained against GPU time, a panel for each lead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from sim.benchmarks.policies.ranking import Ranking, RankingTable

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 430, 300, 52, 40, 40, 14
# The share that misses is drawn by its root, so that a thousandth and a tenth can both be read.
MISSES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2)
MOST_RATIO = 2.0
_STEPS = 5
COLOURS = {
    "predictive": "#0b6e99",
    "token_saturation": "#d9822b",
    "target_tracking": "#7a5195",
    "panic_window": "#b3261e",
    "static": "#8a949b",
}
_OTHER = "#444444"


def chart(title: str, table: RankingTable, promised: float) -> str:
    """The SVG: GPU time is in units of what the plan that knows the future takes."""
    width, height = WIDTH * len(table.oracles), HEIGHT + 30
    names = list(dict.fromkeys(each.policy for each in table.standings))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="16" font-size="13">{escape(title)}</text>',
    ]
    for column, oracle in enumerate(table.oracles):
        mine = [each for each in table.standings if each.lead_s == oracle.lead_s]
        parts += _panel(
            f"a start takes {oracle.lead_s:g} s", WIDTH * column, mine, oracle.gpu_hours, promised
        )
    for index, name in enumerate(names):
        x = LEFT + 120 * index
        parts.append(f'<rect x="{x}" y="{HEIGHT + 8}" width="10" height="10" fill="{_colour(name)}"/>')
        parts.append(f'<text x="{x + 14}" y="{HEIGHT + 17}">{escape(name.replace("_", " "))}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, left: int, mine: Sequence[Ranking], plan: float, promised: float) -> list[str]:
    parts = [f'<text x="{left + LEFT}" y="{TOP - 6}" font-weight="bold">{escape(title)}</text>']
    for miss in MISSES:
        y = _y(1 - miss)
        parts.append(_line(left + LEFT, y, left + WIDTH - RIGHT, y, "#e3e7ea"))
        parts.append(f'<text x="{left + LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{1 - miss:.1%}</text>')
    for step in range(_STEPS + 1):
        ratio = 0.8 + step * (MOST_RATIO - 0.8) / _STEPS
        x = _x(left, ratio)
        parts.append(_line(x, TOP, x, HEIGHT - BOTTOM, "#e3e7ea"))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{ratio:.2f}</text>')
    x = left + (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="middle">GPU time over the clairvoyant plan</text>'
    )
    parts.append(_line(left + LEFT, _y(promised), left + WIDTH - RIGHT, _y(promised), "#444444"))
    for each in mine:
        near = [(point.gpu_hours / plan, point.attainment) for point in each.front]
        shown = [
            (ratio, attained)
            for ratio, attained in near
            if ratio <= MOST_RATIO and 1 - attained <= MISSES[-1]
        ]
        points = [(_x(left, ratio), _y(attained)) for ratio, attained in shown]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = _colour(each.policy)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in points]
    return parts


def _x(left: int, ratio: float) -> float:
    return left + LEFT + (WIDTH - LEFT - RIGHT) * (ratio - 0.8) / (MOST_RATIO - 0.8)


def _y(attained: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * math.sqrt((1.0 - attained) / MISSES[-1])


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _colour(name: str) -> str:
    return COLOURS.get(name, _OTHER)
