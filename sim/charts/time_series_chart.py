"""One chart of the report: lines, steps, areas between lines, limits and decisions on a time axis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from sim.charts.figure_style import (
    COLOURS,
    FAINT,
    GRID,
    INK,
    LIMIT,
    add_axes,
    log_axis,
    name_mode,
    new_figure,
    styled,
    time_axis,
    tint,
    to_svg,
    value_axis,
)
from sim.results.chart_series import ChartAnnotation, ModeInterval, clock
from sim.simulator.run_record import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 560, 150
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 18, 22
# Width of a character in pixels: the page enlarges the text of small charts.
LETTER = 8
# Colours and dashes (in pixels) of the kinds of lines.
KINDS = dict(zip("abcd", COLOURS, strict=True))
DASHES = {"a": (), "b": (5, 2), "c": (2, 2), "d": (7, 2, 2, 2)}
# Placeholders of the modes' tints. The page's style sheet has the colours, for light and for dark.
MODES = ("#0000f0", "#0000f1", "#0000f2", "#0000f3")
VARIABLES = (
    {colour: f"var(--{kind})" for kind, colour in KINDS.items()}
    | {colour: f"var(--m{i})" for i, colour in enumerate(MODES)}
    | {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--grid)", LIMIT: "var(--limit)"}
)


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One value per window of ``width_s``; ``kind`` (a..d) is its colour and dash.

    ``steps`` hold a value until the next; ``above`` is the lower line of a filled area.
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
    """A chart: ``limit`` is an SLO target in the unit of the values, ``note`` an explanation in its heading.

    ``whole`` values are counts. A dwell has the tint of its mode's place in ``modes``.
    """

    key: str
    title: str
    unit: str
    lines: tuple[ChartLine, ...]
    log: bool = False
    whole: bool = False
    limit: float | None = None
    note: str = ""
    stays: tuple[ModeInterval, ...] = ()
    modes: tuple[str, ...] = ()
    marks: tuple[ChartAnnotation, ...] = ()

    def span(self) -> tuple[float, float]:
        """The least value above 0 and the most."""
        values = np.concatenate([line.values for line in self.lines])
        if self.limit is not None:
            values = np.append(values, self.limit)
        known = values[np.isfinite(values) & (values > 0)]
        return (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)

    def description(self, until: float) -> str:
        """The chart in one line, for screen readers."""
        values = np.concatenate([line.values for line in self.lines])
        known = values[np.isfinite(values)]
        span = f"from {number(known.min())} to {number(known.max())} {self.unit}" if len(known) else "-"
        return f"{self.title} over {clock(until)}, {span}".strip()


def common_span(charts: Iterable[Chart]) -> tuple[float, float]:
    """The range of values of several charts, which share a vertical scale so that they can be compared."""
    spans = [chart.span() for chart in charts]
    return min(low for low, _ in spans), max(high for _, high in spans)


@styled
def draw(chart: Chart, identity: str, until: float, span: tuple[float, float]) -> str:
    """The SVG of ``chart`` from 0 to ``until`` seconds; ``identity`` is its id, unique on the page."""
    figure = new_figure(WIDTH, HEIGHT)
    axes = add_axes(figure, LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    axes.tick_params(labelsize=10)
    axes.tick_params(axis="x", pad=9)  # the page enlarges the labels of both axes, which meet in the corner
    time_axis(axes, until)
    if chart.log:
        log_axis(axes, *span)
    else:
        value_axis(axes, span[1], whole=chart.whole)
    for label, at in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True):
        # A label at the right end would be cut off if it were centred.
        if _x(at, until) + LETTER * len(clock(at)) / 2 > WIDTH:
            label.set_horizontalalignment("right")
    _tint(axes, chart, until)
    for line in chart.lines:
        _line(axes, line)
    if chart.limit is not None:
        axes.axhline(chart.limit, color=LIMIT, linewidth=1, dashes=(8, 3), clip_on=False)
    for i, mark in enumerate(chart.marks):
        x = (_x(mark.at, until) - LEFT) / (WIDTH - LEFT - RIGHT)
        wide, high = 4.5 / (WIDTH - LEFT - RIGHT), 9 / (HEIGHT - TOP - BOTTOM)
        corners = ([x - wide, x, x + wide], [0.0, high, 0.0])
        axes.fill(*corners, transform=axes.transAxes, color=INK, linewidth=0, clip_on=False, gid=f"mark-{i}")
    return _inline(to_svg(figure), chart, identity, until)


def hovered(chart: Chart) -> dict[str, Any]:
    """What the page shows of an instant: the chart's unit, the values of each line, the modes."""
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


def _x(at: float, until: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at / until


def _tint(axes: Axes, chart: Chart, until: float) -> None:
    """Tint each mode, up to above the lines, and write its name there where it fits."""
    tint(axes, chart.stays, chart.modes, MODES)
    top = HEIGHT / (HEIGHT - TOP - BOTTOM)
    for patch in axes.patches:
        patch.set(clip_on=False, height=(HEIGHT - BOTTOM) / HEIGHT * top)
    for stay in chart.stays:
        if _x(stay.end, until) - _x(stay.start, until) > LETTER * len(stay.mode) + 6:
            name_mode(axes, stay)


def _line(axes: Axes, line: ChartLine) -> None:
    colour, dashes = KINDS[line.kind], DASHES[line.kind]
    style: dict[str, Any] = {
        "color": colour,
        "linewidth": 1.4,
        "clip_on": False,
        "linestyle": (0, dashes) if dashes else "-",
    }
    area: dict[str, Any] = {"color": colour, "alpha": 0.16, "linewidth": 0, "clip_on": False}
    low, high = axes.get_ylim()
    values = np.clip(line.values, low, high)
    floor = np.full(len(values), low) if line.above is None else np.clip(line.above, low, high)
    filled = line.filled or line.above is not None
    if line.steps:
        # A step that goes on is one step.
        starts = np.flatnonzero(np.diff(values + 1j * floor, prepend=np.inf) != 0)
        edges = np.append(starts, len(values)) * line.width_s
        values, floor = values[starts], floor[starts]
        for a, b in _runs(values + floor) if filled else ():
            axes.stairs(values[a:b], edges[a : b + 1], baseline=floor[a:b], fill=True, **area)
        axes.stairs(values, edges, baseline=None, gid=f"line-{line.name}", **style)
        return
    at = (np.arange(len(values)) + 0.5) * line.width_s
    for a, b in _runs(values + floor) if filled else ():
        if line.above is None:
            axes.fill([at[a], *at[a:b], at[b - 1]], [low, *values[a:b], low], **area)
        else:
            axes.fill([*at[a:b], *at[a:b][::-1]], [*values[a:b], *floor[a:b][::-1]], **area)
    # A value alone has no length: it is drawn as wide as half its window.
    alone = [(at[a], values[a]) for a, b in _runs(values) if b - a == 1]
    for x, y in alone:
        axes.plot([x, x + line.width_s / 2], [y, y], **style)
    axes.plot(at, values, gid=f"line-{line.name}", **style)


def _runs(values: Floats) -> Iterator[tuple[int, int]]:
    """The stretches without a gap, as half-open ranges of indices."""
    known = np.isfinite(values)
    edges = np.flatnonzero(np.diff(known, prepend=False, append=False))
    yield from ((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))


def _inline(svg: str, chart: Chart, identity: str, until: float) -> str:
    """The SVG as an element of the page: its colours are the page's, its groups have classes and titles."""
    body = svg[svg.index("<g ") : svg.rindex("</svg>")]
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    # Fonts are the page's; what is outside of the axes was cut off in the values.
    body = re.sub(r' clip-path="[^"]*"|font-size: [^;]*; font-family: [^;]*; |<g id="[^"]*"/>', "", body)
    titles = {
        f"dwell-{i}": ('class="dwell"', f"{stay.mode} from {clock(stay.start)} to {clock(stay.end)}")
        for i, stay in enumerate(chart.stays)
    } | {
        f"mark-{i}": (f'class="mark" role="img" data-at="{mark.at:.3f}"', mark.text)
        for i, mark in enumerate(chart.marks)
    }
    for name, (attributes, title) in titles.items():
        body = body.replace(f'<g id="{name}">', f"<g {attributes}><title>{escape(title)}</title>")
    for line in chart.lines:
        body = body.replace(
            f'<g id="line-{line.name}">', f'<g class="line" data-name={quoteattr(line.name)}>'
        )
    body = re.sub(r">\s+<", "><", re.sub(r'<g id="[^"]*">', "<g>", body))
    return (
        f'<svg id={quoteattr(identity)} class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'tabindex="0" aria-label={quoteattr(chart.description(until))} data-until="{until:g}">'
        f"{body}"
        f'<line class="cursor" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )
