"""Horizontal bars: a panel for each number, a bar for each contender."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from sim.charts.figure import COLOURS, INK, LIMIT, OTHER, add_axes, new_figure, styled, to_svg

LABELS, PANEL, TOP, ROW = 170, 230, 66, 22


class Panel(NamedTuple):
    """One number of all contenders, NaN where one has none, on a scale of its own that begins at 0.

    ``bound`` is drawn as a line if it is more than 0; ``ranges`` are the lowest and highest measurements.
    """

    title: str
    values: Sequence[float]
    bound: float = 0.0
    ranges: Sequence[tuple[float, float]] = ()


@styled
def bars(title: str, names: Sequence[str], panels: Sequence[Panel], ours: Collection[str] = ()) -> str:
    """The SVG; ``ours`` (without any, the first) of ``names`` have their own colour."""
    figure = new_figure(LABELS + PANEL * len(panels), TOP + ROW * len(names) + 16, title)
    colours = [COLOURS[0] if name in (ours or names[:1]) else OTHER for name in names]
    for column, panel in enumerate(panels):
        axes = add_axes(figure, LABELS + PANEL * column, TOP, PANEL - 60, ROW * len(names))
        axes.set_title(panel.title)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), names if column == 0 else [""] * len(names))
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.barh(range(len(names)), panel.values, height=0.72, color=colours)
        ends = [high for _, high in panel.ranges] or panel.values
        axes.set_xlim(0.0, max((end for end in (*ends, panel.bound) if end > 0.0), default=1.0))
        if panel.ranges:
            lows, highs = zip(*panel.ranges, strict=True)
            axes.hlines(range(len(names)), lows, highs, color=INK, linewidth=1, clip_on=False)
        for row, (value, end) in enumerate(zip(panel.values, ends, strict=True)):
            if math.isfinite(value):
                axes.annotate(f"{value:.4g}", (end, row), (4, 0), textcoords="offset points", va="center")
        if panel.bound:
            axes.axvline(panel.bound, color=LIMIT, linewidth=1, clip_on=False)
    return to_svg(figure)
