"""One chart as SVG: lines, steps, bands between lines, and marks to hover over, on a common time axis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from sim.charts.axis import Scale, linear, logarithmic, times
from sim.results.series import Annotation, Dwell, clock
from sim.twin.record import Floats

WIDTH, HEIGHT = 560, 150
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 18, 22
# So many tints of modes the page has.
MODES = 4
# The page enlarges letters on small charts: this is the most that one is wide.
LETTER = 8


@dataclass(frozen=True, slots=True)
class Line:
    """One value per window of ``width_s``; ``kind`` is its colour and dash in the style of the page.

    ``steps`` stay until the next value. ``above`` fills what is between this line and that other one.
    """

    name: str
    kind: str
    width_s: float
    values: Floats
    steps: bool = False
    filled: bool = False
    above: Floats | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn: ``limit`` is a promise, in the unit of the values; ``note`` says what else there is.

    Values that are ``whole`` are counts. A stay has the tint of its mode's place in ``modes``.
    """

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    log: bool = False
    whole: bool = False
    limit: float | None = None
    note: str = ""
    stays: tuple[Dwell, ...] = ()
    modes: tuple[str, ...] = ()
    marks: tuple[Annotation, ...] = ()

    def span(self) -> tuple[float, float]:
        """The least value above 0 and the most."""
        values = np.concatenate([line.values for line in self.lines])
        if self.limit is not None:
            values = np.append(values, self.limit)
        known = values[np.isfinite(values) & (values > 0)]
        return (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)

    def told(self, until: float) -> str:
        """The chart in a line, for whoever does not see it."""
        values = np.concatenate([line.values for line in self.lines])
        known = values[np.isfinite(values)]
        said = f"from {number(known.min())} to {number(known.max())} {self.unit}" if len(known) else "nothing"
        return f"{self.title} over {clock(until)}, {said}".strip()


def scale_of(charts: Iterable[Chart]) -> Scale:
    """The vertical scale that charts have in common, so that they can be compared by eye."""
    charts = list(charts)
    low, high = min(chart.span()[0] for chart in charts), max(chart.span()[1] for chart in charts)
    start, end = HEIGHT - BOTTOM, TOP
    if charts[0].log:
        return logarithmic(low, high, start, end)
    return linear(high, start, end, whole=charts[0].whole)


def draw(chart: Chart, identity: str, until: float, y: Scale) -> str:
    """The SVG of ``chart`` from 0 ``until`` so many seconds; ``identity`` is unique on the page."""
    x = Scale(0.0, until, LEFT, WIDTH - RIGHT)
    parts = [
        f'<svg id={quoteattr(identity)} class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'tabindex="0" aria-label={quoteattr(chart.told(until))} data-until="{until:g}">',
        *_stays(chart, x),
        *_axes(x, y),
    ]
    for line in chart.lines:
        parts += _line(line, x, y)
    if chart.limit is not None:
        at = y(chart.limit)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    parts.append(f'<line class="cursor" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    parts += [_mark(mark, x) for mark in chart.marks]
    return "\n".join([*parts, "</svg>"])


def hovered(chart: Chart) -> dict[str, Any]:
    """What the page says of an instant of the chart: its unit, the values of each line, the modes."""
    return {
        "unit": chart.unit,
        "lines": [
            {
                "name": line.name,
                "width": round(line.width_s, 6),
                "values": [_short(value) for value in line.values],
            }
            for line in chart.lines
        ],
        "stays": [[round(stay.start, 3), stay.mode] for stay in chart.stays],
    }


def number(value: float) -> str:
    """Three digits of ``value``."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _short(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    short = float(f"{value:.3g}")
    return int(short) if short.is_integer() else short


def _axes(x: Scale, y: Scale) -> list[str]:
    parts = []
    for value in y.ticks(5):
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{at + 3:.1f}" text-anchor="end">{value:g}</text>')
    for value in times(x.high):
        at, said = x(value), clock(value)
        # At the right end an instant would be cut off where it stood in the middle.
        last = at + LETTER * len(said) / 2 > WIDTH
        at, anchor = (float(WIDTH), "end") if last else (at, "middle")
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - 5}" text-anchor="{anchor}">{said}</text>')
    return parts


def _stays(chart: Chart, x: Scale) -> list[str]:
    """A tint for each mode, up to above the lines, and its name there where it fits."""
    parts = []
    for stay in chart.stays:
        start, end = x(stay.start), x(stay.end)
        parts.append(
            f'<rect class="mode{chart.modes.index(stay.mode) % MODES}" x="{start:.1f}" y="0" '
            f'width="{end - start:.1f}" height="{HEIGHT - BOTTOM}">'
            f"<title>{escape(stay.mode)} from {clock(stay.start)} to {clock(stay.end)}</title></rect>"
        )
        if end - start > LETTER * len(stay.mode) + 6:
            parts.append(f'<text class="mode" x="{start + 3:.1f}" y="{TOP - 4}">{escape(stay.mode)}</text>')
    return parts


def _line(line: Line, x: Scale, y: Scale) -> list[str]:
    kind = quoteattr(f"line {line.kind}")
    path = _path(line, line.values, x, y)
    parts = []
    if line.above is not None or line.filled:
        area = _area(line, x, y)
        parts.append(f'<path class={quoteattr(f"area {line.kind}")} d="{area}"/>')
    return [*parts, f'<path class={kind} d="{path}"/>']


def _runs(values: Floats) -> list[tuple[int, int]]:
    """The stretches without a gap, as half-open ranges of indices."""
    known = np.isfinite(values)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], known, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _points(line: Line, values: Floats, run: tuple[int, int], x: Scale, y: Scale) -> list[str]:
    points: list[str] = []
    height = ""
    for i in range(*run):
        before, height = height, f"{y(float(values[i])):.1f}"
        if not line.steps:
            points.append(f"{x((i + 0.5) * line.width_s):.1f},{height}")
            continue
        if height == before:  # the step that there is goes on
            points.pop()
        else:
            points.append(f"{x(i * line.width_s):.1f},{height}")
        points.append(f"{x((i + 1) * line.width_s):.1f},{height}")
    if len(points) == 1:  # a point has no length to be seen by
        points.append(f"{x((run[0] + 1) * line.width_s):.1f},{points[0].partition(',')[2]}")
    return points


def _path(line: Line, values: Floats, x: Scale, y: Scale) -> str:
    return " ".join("M" + " ".join(_points(line, values, run, x, y)) for run in _runs(values))


def _area(line: Line, x: Scale, y: Scale) -> str:
    parts = []
    for run in _runs(line.values if line.above is None else line.values + line.above):
        over = _points(line, line.values, run, x, y)
        if line.above is None:
            ground = f"{y(y.low):.1f}"
            below = [f"{over[0].partition(',')[0]},{ground}", f"{over[-1].partition(',')[0]},{ground}"]
        else:
            below = _points(line, line.above, run, x, y)
        parts.append("M" + " ".join([*over, *reversed(below)]) + "Z")
    return " ".join(parts)


def _mark(mark: Annotation, x: Scale) -> str:
    at, foot = x(mark.at), HEIGHT - BOTTOM
    return (
        f'<g class="mark" role="img" data-at="{mark.at:.3f}"><title>{escape(mark.text)}</title>'
        f'<path d="M{at:.1f},{foot - 9} l4.5,9 h-9 Z"/></g>'
    )
