"""The chart of a comparison as one SVG: a panel for each measure, with a line for each run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from policy.config.control import SloConfig
from sim.charts.comparison_table import percent
from sim.charts.figure_style import (
    COLOURS,
    FAINT,
    LIMIT,
    add_axes,
    log_axis,
    new_figure,
    styled,
    time_axis,
    to_svg,
    value_axis,
)
from sim.results.chart_series import ChartData
from sim.results.run_summary import PolicyComparison
from sim.simulator.run_record import Floats

WIDTH, LEFT, PANEL, GAP, TOP, ENTRY = 760, 52, 92, 28, 40, 17


class _Panel(NamedTuple):
    """The values of each run in windows of ``width_s``, or one line of all runs; ``limit`` is the SLO."""

    title: str
    values: Sequence[Floats]
    width_s: Sequence[float]
    log: bool = False
    limit: float | None = None
    shared: bool = False


@styled
def comparison_chart(comparison: PolicyComparison) -> str:
    """The SVG; the legend has each run's attainment and GPU-hours."""
    panels = [
        panel
        for pictures in zip(*(run.pictures for run in comparison.runs), strict=True)
        for panel in _panels(pictures, comparison.objectives.get(pictures[0].model, SloConfig()))
    ]
    top = TOP + ENTRY * len(comparison.runs) + GAP
    height = top + (PANEL + GAP) * len(panels) + 4
    figure = new_figure(WIDTH, height, f"{comparison.trace}, seed {comparison.seed}")
    until = max(picture.ends_at for run in comparison.runs for picture in run.pictures)
    for row, panel in enumerate(panels):
        axes = add_axes(figure, LEFT, top + (PANEL + GAP) * row, WIDTH - LEFT - 12, PANEL)
        axes.set_title(panel.title, fontsize=11, fontweight="normal")
        time_axis(axes, until)
        axes.tick_params(labelbottom=row == len(panels) - 1)
        low, high = _span(panel)
        if panel.log:
            log_axis(axes, low, high)
        else:
            value_axis(axes, high)
        if panel.limit is not None:
            axes.axhline(panel.limit, color=LIMIT, linewidth=1, dashes=(8, 3))
        for run, (values, width_s) in enumerate(zip(panel.values, panel.width_s, strict=True)):
            at = (np.arange(len(values)) + 0.5) * width_s
            colour = FAINT if panel.shared else COLOURS[run % len(COLOURS)]
            axes.plot(at, np.maximum(values, axes.get_ylim()[0]), color=colour)
    labels = [
        f"{run.name}: {percent(run.summary.attainment)} within the SLO, {run.summary.gpu_hours:.2f} GPU-hours"
        for run in comparison.runs
    ]
    # The last panel has a line for each run.
    figure.legend(
        figure.axes[-1].lines[-len(labels) :],
        labels,
        loc="upper left",
        bbox_to_anchor=(10 / WIDTH, 1 - (TOP - 10) / height),
        frameon=False,
        borderaxespad=0.0,
    )
    return to_svg(figure)


def _panels(pictures: Sequence[ChartData], slo: SloConfig) -> Iterator[_Panel]:
    first = pictures[0]
    windows = [picture.width_s for picture in pictures]
    yield _Panel(f"{first.model}: requests/s", [first.arrivals], windows[:1], shared=True)
    yield _Panel("ready replicas", [picture.ready for picture in pictures], windows)
    for name, limit in (("TTFT", slo.ttft_p95_s), ("ITL", slo.itl_p95_s)):
        if limit is not None:
            bands = [getattr(picture, name.lower()) for picture in pictures]
            title = f"{name} at p90, s (dashed: SLO)"
            yield _Panel(title, [band.p90 for band in bands], [band.width_s for band in bands], True, limit)
    met = [100 * picture.met for picture in pictures]
    yield _Panel("% within the SLO, last minute", met, windows, limit=100 * slo.attainment)


def _span(panel: _Panel) -> tuple[float, float]:
    values = np.concatenate([*panel.values, [] if panel.limit is None else [panel.limit]])
    known = values[np.isfinite(values) & (values > 0)]
    return (float(known.min()), float(known.max())) if len(known) else (1.0, 1.0)
