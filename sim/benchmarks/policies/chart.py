"""Chart of the benchmark of policies: attainment over GPU time, a panel for each start-up time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sim.benchmarks.policies.gpu_time_ranking import Ranking, RankingTable
from sim.charts.figure_style import COLOURS, FAINT, INK, LIMIT, add_axes, new_figure, styled, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, LEFT = 430, 330, 52
# The fraction of misses is drawn by its square root, so that 0.1 % and 10 % are both readable.
MISSES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2)
MIN_RATIO, MAX_RATIO = 0.8, 2.0
POLICIES = {
    "predictive": COLOURS[0],
    "token_saturation": COLOURS[1],
    "target_tracking": COLOURS[2],
    "panic_window": LIMIT,
    "static": FAINT,
}


@styled
def chart(title: str, table: RankingTable, attainment: float) -> str:
    """The SVG: GPU time over the offline optimum; ``attainment`` is that of the SLO."""
    figure = new_figure(WIDTH * len(table.oracles), HEIGHT, title)
    for column, oracle in enumerate(table.oracles):
        axes = add_axes(figure, LEFT + WIDTH * column, 50, WIDTH - LEFT - 14, HEIGHT - 130)
        axes.set_title(f"start-up time {oracle.lead_s:g} s")
        rankings = [each for each in table.standings if each.lead_s == oracle.lead_s]
        _panel(axes, rankings, oracle.gpu_hours, attainment)
    lines = {
        str(line.get_label()): line
        for axes in figure.axes
        for line in axes.lines
        if not str(line.get_label()).startswith("_")
    }
    figure.legend(list(lines.values()), list(lines), loc="lower left", ncols=len(lines) or 1, frameon=False)
    return to_svg(figure)


def _panel(axes: Axes, rankings: Sequence[Ranking], optimum_hours: float, attainment: float) -> None:
    root = (lambda y: -np.sqrt(np.maximum(1.0 - y, 0.0)), lambda y: 1.0 - y**2)
    axes.set_yscale("function", functions=root)
    axes.set_ylim(1.0 - MISSES[-1], 1.0)
    axes.set_yticks([1.0 - miss for miss in MISSES], [f"{1.0 - miss:.1%}" for miss in MISSES])
    axes.set_xlim(MIN_RATIO, MAX_RATIO)
    axes.set_xlabel("GPU time over the offline optimum")
    axes.grid(visible=True, axis="both")
    axes.axhline(attainment, color=INK, linewidth=1)
    for each in rankings:
        points = [(point.gpu_hours / optimum_hours, point.attainment) for point in each.front]
        shown = [(x, y) for x, y in points if x <= MAX_RATIO and 1.0 - y <= MISSES[-1]]
        axes.plot(
            [x for x, _ in shown],
            [y for _, y in shown],
            marker="o",
            markersize=5,
            linewidth=1.6,
            color=POLICIES.get(each.policy, INK),
            label=each.policy.replace("_", " "),
            clip_on=False,
        )
