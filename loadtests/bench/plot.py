"""Bars with ranges as an SVG: panels beside each other, one bar for each system."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

from loadtests.bench.figures import Figure

BAR = 16
GAP = 6
LABEL = 190
PANEL = 250
TOP = 56
OURS, OTHERS = "#0b6e99", "#b8c4cc"


def bars(title: str, panels: Mapping[str, Mapping[str, Figure]]) -> str:
    """The SVG; each panel has its own scale, names that begin with ``tidegate`` their own colour."""
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    width, height = LABEL + PANEL * len(panels) + 20, TOP + (BAR + GAP) * len(names) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for row, name in enumerate(names):
        y = TOP + row * (BAR + GAP) + BAR - 5
        parts.append(f'<text x="{LABEL - 8}" y="{y}" text-anchor="end">{escape(name)}</text>')
    for column, (panel, figures) in enumerate(panels.items()):
        left = LABEL + column * PANEL
        parts.append(f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{escape(panel)}</text>')
        scale = (PANEL - 70) / max(figure.high for figure in figures.values())
        for row, name in enumerate(names):
            if name in figures:
                parts += _bar(
                    figures[name], left, TOP + row * (BAR + GAP), scale, ours=name.startswith("tidegate")
                )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(figure: Figure, left: float, top: float, scale: float, *, ours: bool) -> list[str]:
    middle = top + BAR / 2
    colour = OURS if ours else OTHERS
    low, end, high = (left + scale * each for each in (figure.low, figure.median, figure.high))
    return [
        f'<rect x="{left}" y="{top}" width="{end - left:.1f}" height="{BAR}" fill="{colour}"/>',
        f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}" stroke="black"/>',
        f'<text x="{high + 4:.1f}" y="{top + BAR - 5}">{figure.median:.3g}</text>',
    ]
