"""Chart of the benchmark of modes: the goodput of each contender over time, over the modes of the first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sim.benchmarks.modes import WINDOW_S, Trial
from sim.charts.figure import (
    COLOURS,
    TINTS,
    add_axes,
    name_mode,
    new_figure,
    styled,
    time_axis,
    tint,
    to_svg,
    value_axis,
)

WIDTH, HEIGHT = 760, 330


@styled
def curves(title: str, trials: Mapping[str, Trial]) -> str:
    """The SVG of one trial of each contender; the first, whose mode follows the load, is on top."""
    first = next(iter(trials.values()))
    figure = new_figure(WIDTH, HEIGHT, title)
    axes = add_axes(figure, 48, 76, WIDTH - 60, HEIGHT - 102)
    time_axis(axes, max(trial.ends_at for trial in trials.values()))
    value_axis(axes, max(float(trial.curve.max()) for trial in trials.values()))
    tint(axes, first.stays, list(dict.fromkeys(stay.mode for stay in first.stays)), TINTS)
    for stay in first.stays:
        name_mode(axes, stay)
    for row, (name, trial) in enumerate(trials.items()):
        at = (np.arange(len(trial.curve)) + 0.5) * WINDOW_S
        width, colour = (1.2 if row else 2.0), COLOURS[row % len(COLOURS)]
        axes.plot(
            at, trial.curve, label=name.replace("_", " "), color=colour, linewidth=width, zorder=3 - row / 10
        )
    place = (48 / WIDTH, 1 - 24 / HEIGHT)
    figure.legend(loc="upper left", bbox_to_anchor=place, ncols=len(trials), frameon=False, borderaxespad=0.0)
    return to_svg(figure)
