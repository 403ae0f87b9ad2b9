"""Quantiles of what was live and of the twin as two curves for each measure, in one SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import numpy as np

from sim.calibration.quantiles import known

WIDTH, HEIGHT, LEFT, TOP, GAP = 260, 220, 70, 60, 80
LIVE, TWIN, GRID = "#0b6e99", "#b3261e", "#d5dde2"
_POINTS = 100
# A decade of seconds is divided at these.
_MARKS = (1.0, 2.0, 5.0)


def curves(title: str, live: Mapping[str, Sequence[float]], twin: Mapping[str, Sequence[float]]) -> str:
    """The SVG: over the part of the requests, how many seconds that part took at most, on a log scale."""
    measures = [measure for measure in live if known(live[measure]).size and known(twin[measure]).size]
    width, height = LEFT + (WIDTH + GAP) * len(measures), TOP + HEIGHT + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="10" y="38" fill="{LIVE}">live</text><text x="46" y="38" fill="{TWIN}">twin</text>',
    ]
    for column, measure in enumerate(measures):
        parts += _panel(
            measure.upper(), known(live[measure]), known(twin[measure]), LEFT + column * (WIDTH + GAP)
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    title: str,
    live: np.ndarray[tuple[int], np.dtype[np.float64]],
    twin: np.ndarray[tuple[int], np.dtype[np.float64]],
    left: int,
) -> list[str]:
    parts = np.linspace(0.0, 1.0, _POINTS + 1)
    # What no clock tells from nothing has no place on a log scale.
    values = [np.maximum(np.quantile(each, parts), 1e-6) for each in (live, twin)]
    low, high = (math.log10(float(end)) for end in (min(v[0] for v in values), max(v[-1] for v in values)))
    span = max(high - low, 0.1)

    def y(seconds: float) -> float:
        return TOP + HEIGHT * (1.0 - (math.log10(seconds) - low) / span)

    found = [f'<text x="{left}" y="{TOP - 8}" font-weight="bold">{escape(title)}</text>']
    for decade in range(math.floor(low), math.ceil(high) + 1):
        for mark in _MARKS:
            seconds = mark * 10.0**decade
            if low <= math.log10(seconds) <= low + span:
                at = y(seconds)
                found.append(
                    f'<line x1="{left}" y1="{at:.1f}" x2="{left + WIDTH}" y2="{at:.1f}" stroke="{GRID}"/>'
                )
                found.append(
                    f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{_said(seconds)}</text>'
                )
    for part in (0.0, 0.5, 0.9):
        at = left + WIDTH * part
        found.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{TOP + HEIGHT}" stroke="{GRID}"/>')
        found.append(f'<text x="{at:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{part:.0%}</text>')
    for colour, line in zip((LIVE, TWIN), values, strict=True):
        points = " ".join(
            f"{left + WIDTH * p:.1f},{y(float(v)):.1f}" for p, v in zip(parts, line, strict=True)
        )
        found.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return found


def _said(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1.0 else f"{1e3 * seconds:g} ms"
