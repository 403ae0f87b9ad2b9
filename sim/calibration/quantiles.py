"""Live latency quantiles compared with those of the simulator, as numbers and as a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from sim.charts.figure_style import COLOURS, LIMIT, add_axes, log_axis, new_figure, styled, to_svg

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class QuantilePair(msgspec.Struct, frozen=True):
    """One quantile in seconds, ``live`` and in the simulator, with its signed relative ``error``."""

    live: float
    simulated: float
    error: float


class LatencyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles by measure and name of ``live`` requests, which were served, and in the simulator.

    It served ``simulated`` of them. ``failed`` requests failed live, ``left_out`` were of other models.
    """

    live: int
    simulated: int
    failed: int
    left_out: int
    quantiles: dict[str, dict[str, QuantilePair]]


def compare(
    live: Mapping[str, Sequence[float]], simulated: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, QuantilePair]]:
    """The quantiles of each measure; one without values on either side is left out."""
    found: dict[str, dict[str, QuantilePair]] = {}
    for measure in live:
        one, other = known(live[measure]), known(simulated[measure])
        if one.size and other.size:
            found[measure] = {
                name: _pair(float(np.quantile(one, part)), float(np.quantile(other, part)))
                for name, part in QUANTILES.items()
            }
    return found


def known(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The finite values, sorted."""
    given = np.asarray(values, dtype=np.float64)
    return np.sort(given[~np.isnan(given)])


def _pair(live: float, simulated: float) -> QuantilePair:
    # Below the clock resolution of a microsecond.
    return QuantilePair(live, simulated, simulated / live - 1.0 if live > 1e-6 else 0.0)


WIDTH, HEIGHT, LEFT, TOP, GAP = 260, 220, 70, 70, 80


@styled
def curves(title: str, live: Mapping[str, Sequence[float]], simulated: Mapping[str, Sequence[float]]) -> str:
    """The SVG: a panel for each measure with the seconds of each quantile, on a logarithmic scale."""
    measures = [measure for measure in live if known(live[measure]).size and known(simulated[measure]).size]
    width, height = LEFT + (WIDTH + GAP) * len(measures), TOP + HEIGHT + 50
    figure = new_figure(width, height, title)
    figure.text(10 / width, 1 - 38 / height, "live", color=COLOURS[0])
    figure.text(46 / width, 1 - 38 / height, "simulated", color=LIMIT)
    parts = np.linspace(0.0, 1.0, 101)
    for column, measure in enumerate(measures):
        axes = add_axes(figure, LEFT + column * (WIDTH + GAP), TOP, WIDTH, HEIGHT)
        axes.set_title(measure.upper())
        values = [np.maximum(np.quantile(known(side[measure]), parts), 1e-6) for side in (live, simulated)]
        log_axis(axes, min(v[0] for v in values), max(v[-1] for v in values), _label)
        axes.set_xlim(0.0, 1.0)
        axes.set_xticks([0.0, 0.5, 0.9], ["0%", "50%", "90%"])
        axes.grid(visible=True, axis="x")
        for colour, line in zip((COLOURS[0], LIMIT), values, strict=True):
            axes.plot(parts, np.maximum(line, axes.get_ylim()[0]), color=colour, linewidth=2)
    return to_svg(figure)


def _label(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1.0 else f"{1e3 * seconds:g} ms"
