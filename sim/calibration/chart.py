"""Chart of a calibration: the quantiles that were measured live and those of the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sim.calibration.quantiles import known
from sim.charts.figure import COLOURS, LIMIT, add_axes, log_axis, new_figure, styled, to_svg

WIDTH, HEIGHT, LEFT, TOP, GAP = 260, 220, 70, 70, 80


@styled
def curves(title: str, live: Mapping[str, Sequence[float]], twin: Mapping[str, Sequence[float]]) -> str:
    """The SVG: a panel for each measure with the seconds of each quantile, on a logarithmic scale."""
    measures = [measure for measure in live if known(live[measure]).size and known(twin[measure]).size]
    width, height = LEFT + (WIDTH + GAP) * len(measures), TOP + HEIGHT + 50
    figure = new_figure(width, height, title)
    figure.text(10 / width, 1 - 38 / height, "live", color=COLOURS[0])
    figure.text(46 / width, 1 - 38 / height, "twin", color=LIMIT)
    parts = np.linspace(0.0, 1.0, 101)
    for column, measure in enumerate(measures):
        axes = add_axes(figure, LEFT + column * (WIDTH + GAP), TOP, WIDTH, HEIGHT)
        axes.set_title(measure.upper())
        # What no clock tells from 0 has no place on a logarithmic scale.
        values = [np.maximum(np.quantile(known(side[measure]), parts), 1e-6) for side in (live, twin)]
        log_axis(axes, min(v[0] for v in values), max(v[-1] for v in values), _label)
        axes.set_xlim(0.0, 1.0)
        axes.set_xticks([0.0, 0.5, 0.9], ["0%", "50%", "90%"])
        axes.grid(visible=True, axis="x")
        for colour, line in zip((COLOURS[0], LIMIT), values, strict=True):
            axes.plot(parts, np.maximum(line, axes.get_ylim()[0]), color=colour, linewidth=2)
    return to_svg(figure)


def _label(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1.0 else f"{1e3 * seconds:g} ms"
