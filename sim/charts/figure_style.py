"""Charts as SVG by matplotlib: the style, the axes and the output that all charts share.

matplotlib is imported on first use, so that a command that draws nothing does not pay for it.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from sim.results.chart_series import ModeInterval, clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The first is the colour of what the chart is about.
COLOURS = ("#0b6e99", "#b45309", "#7a3e9d", "#3f7d20")
TINTS = ("#eef4f7", "#fbf0e2", "#f1ebf5", "#edf3ed")
INK, FAINT, GRID, LIMIT, OTHER = "#1c2430", "#667085", "#e4e7ec", "#b3261e", "#b8c4cc"
# Decades of a logarithmic axis below which small values are cut off.
DECADES = 5
# A figure's unit is one pixel of the SVG.
_DPI = 72
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": FAINT,
    "axes.spines.bottom": False,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.dpi": _DPI,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "grid.color": GRID,
    "lines.scale_dashes": False,
    "svg.fonttype": "none",
    # Element ids are hashes with this salt: the same chart is the same text.
    "svg.hashsalt": "tidegate",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.color": FAINT,
    "ytick.major.size": 0,
}

P = ParamSpec("P")


def styled(draw: Callable[P, str]) -> Callable[P, str]:
    """Run a function that draws a chart in the style of all charts."""

    @wraps(draw)
    def run(*args: P.args, **kwargs: P.kwargs) -> str:
        import matplotlib as mpl  # noqa: PLC0415 - half a second that only charts pay

        with mpl.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return run


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure, sizes in pixels; a figure with a ``title`` is on white paper."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width / _DPI, height / _DPI), facecolor="white" if title else "none")
    if title:
        figure.text(10 / width, 1 - 20 / height, title, fontsize=14)
    return figure


def add_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place in pixels from the figure's upper left corner."""
    whole_width, whole_height = (size * _DPI for size in figure.get_size_inches())
    below = whole_height - top - height
    box = (left / whole_width, below / whole_height, width / whole_width, height / whole_height)
    axes = figure.add_axes(box)
    axes.patch.set_visible(False)
    return axes


def time_axis(axes: Axes, until: float) -> None:
    """Seconds from 0 to ``until``, with ticks at whole hours, minutes or seconds."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    unit = next((unit for unit in (86_400.0, 3600.0, 60.0) if until >= 4 * unit), 1.0)
    locator = MaxNLocator(6, steps=[1, 1.5, 2, 3, 4, 6, 10], integer=until < 6.0)
    found = [unit * float(tick) for tick in locator.tick_values(0.0, until / unit)]
    ticks = [tick for tick in found if 0.0 <= tick <= until and tick.is_integer()]
    axes.set_xlim(0.0, until)
    axes.set_xticks(ticks, [clock(tick) for tick in ticks])


def value_axis(axes: Axes, high: float, *, whole: bool = False) -> None:
    """Values from 0 to a round number that is at least ``high``; the ticks of counts are ``whole``."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    found = MaxNLocator(4, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1).tick_values(0.0, high or 1.0)
    ticks = [float(tick) for tick in found if tick >= 0.0]
    axes.set_ylim(0.0, ticks[-1])
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def log_axis(axes: Axes, low: float, high: float, unit: Callable[[float], str] = "{:g}".format) -> None:
    """Values from about ``low`` to about ``high`` on a logarithmic scale, at most :data:`DECADES` of them."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    # A round number of 1, 2 or 5 times a power of ten below and above.
    low = max(low, high / 10.0**DECADES)
    locator = LogLocator(subs=(1.0, 2.0, 5.0), numticks=100)
    marks = sorted(float(tick) for tick in locator.tick_values(low / 10.0, high * 10.0))
    bottom = max((mark for mark in marks if mark <= low * (1 + 1e-9)), default=marks[0])
    top = min((mark for mark in marks if mark >= high * (1 - 1e-9) and mark > bottom), default=marks[-1])
    powers = {mark for mark in marks if f"{mark:e}".startswith("1.0")}
    ticks = [mark for mark in marks if bottom <= mark <= top and (top <= 150 * bottom or mark in powers)]
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    axes.set_yticks(ticks, [unit(tick) for tick in ticks])
    axes.minorticks_off()


def tint(axes: Axes, dwells: Sequence[ModeInterval], modes: Sequence[str], colours: Sequence[str]) -> None:
    """Tint the time spent in each mode; the group ``dwell-N`` of the SVG is the N-th of ``dwells``."""
    for i, dwell in enumerate(dwells):
        colour = colours[modes.index(dwell.mode) % len(colours)]
        span = axes.axvspan(dwell.start, dwell.end, facecolor=colour, edgecolor="none", zorder=-1)
        span.set_gid(f"dwell-{i}")


def name_mode(axes: Axes, dwell: ModeInterval) -> None:
    """Write the name of the mode above the axes, where the dwell starts."""
    axes.annotate(
        dwell.mode,
        (dwell.start, 1.0),
        (3.0, 4.0),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        fontsize=10,
        color=FAINT,
    )


def to_svg(figure: Figure) -> str:
    """The figure as the text of an SVG, the same for the same figure; coordinates to a tenth of a pixel."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", facecolor=figure.get_facecolor(), metadata=nothing)
    text = out.getvalue()
    text = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", text[text.index("<svg") :])
    return re.sub(r' (?:d|x|y)="[^"]*"', lambda found: _shortened(found[0]), text)


def _shortened(attribute: str) -> str:
    numbers = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), attribute)
    return re.sub(r"\s+", " ", numbers).replace(' "', '"')


LABELS, PANEL, TOP, ROW = 170, 230, 66, 22


class ChartPanel(NamedTuple):
    """One number of all contenders, NaN where one has none, on a scale of its own that begins at 0.

    ``bound`` is drawn as a line if it is more than 0; ``ranges`` are the lowest and highest measurements.
    """

    title: str
    values: Sequence[float]
    bound: float = 0.0
    ranges: Sequence[tuple[float, float]] = ()


@styled
def bars(title: str, names: Sequence[str], panels: Sequence[ChartPanel], ours: Collection[str] = ()) -> str:
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
