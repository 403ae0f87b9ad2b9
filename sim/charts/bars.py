"""Bars beside each other as an SVG: a panel for each number, a bar for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

BAR, GAP, LABEL, PANEL, TOP = 16, 6, 130, 230, 56
OURS, OTHERS, BOUND = "#0b6e99", "#b8c4cc", "#b3261e"


class Panel(NamedTuple):
    """One number of all policies, in their order; ``bound`` is drawn as a line if it is more than 0."""

    title: str
    values: Sequence[float]
    bound: float = 0.0


def bars(title: str, names: Sequence[str], panels: Sequence[Panel]) -> str:
    """The SVG; the first of ``names`` has its own colour, each panel its own scale from 0."""
    width, height = LABEL + PANEL * len(panels) + 10, TOP + (BAR + GAP) * len(names) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for row, name in enumerate(names):
        parts.append(f'<text x="{LABEL - 8}" y="{_y(row) + BAR - 4}" text-anchor="end">{escape(name)}</text>')
    for column, panel in enumerate(panels):
        parts += _panel(panel, LABEL + PANEL * column, len(names))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, left: int, rows: int) -> list[str]:
    most = max(*panel.values, panel.bound)
    scale = (PANEL - 60) / most if most else 0.0
    parts = [f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{escape(panel.title)}</text>']
    for row, value in enumerate(panel.values):
        long, colour = scale * value, OTHERS if row else OURS
        parts += [
            f'<rect x="{left}" y="{_y(row)}" width="{long:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<text x="{left + long + 4:.1f}" y="{_y(row) + BAR - 4}">{value:.4g}</text>',
        ]
    if panel.bound:
        x = left + scale * panel.bound
        end = _y(rows) - GAP
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{end}" stroke="{BOUND}"/>')
    return parts


def _y(row: int) -> int:
    return TOP + row * (BAR + GAP)
