"""Axes hold every value and have round ticks; the same figure is the same SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.charts.figure_style import add_axes, log_axis, new_figure, styled, time_axis, to_svg, value_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from xml.etree import ElementTree

from sim.charts.figure_style import ChartPanel, bars


@pytest.fixture
def axes() -> Axes:
    return add_axes(new_figure(200, 100), 20, 10, 170, 70)


@pytest.mark.slow
@pytest.mark.parametrize("high", [0.0, 0.003, 1.0, 7.0, 99.9, 12_345.0])
@pytest.mark.parametrize("whole", [False, True])
def test_a_linear_axis_begins_at_zero_and_holds_its_values(axes: Axes, high: float, whole: bool) -> None:
    value_axis(axes, high, whole=whole)
    ticks = list(axes.get_yticks())
    assert ticks[0] == 0.0 and ticks[-1] == axes.get_ylim()[1] >= high and 2 <= len(ticks) <= 7
    assert not whole or all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0011, 7.0, [0.001, 0.01, 0.1, 1.0, 10.0]),
        (0.06, 0.13, [0.05, 0.1, 0.2]),
        (0.03, 2.0, [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]),
        (1.0, 1.0, [1.0, 2.0]),
        (1e-12, 1.0, [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]),
    ],
)
def test_a_logarithmic_axis_has_round_ends(axes: Axes, low: float, high: float, ticks: list[float]) -> None:
    log_axis(axes, low, high)
    assert list(axes.get_yticks()) == pytest.approx(ticks)
    assert axes.get_ylim() == pytest.approx((ticks[0], ticks[-1]))


@pytest.mark.parametrize(
    ("until", "ticks"),
    [
        (5.0, [0, 1, 2, 3, 4, 5]),
        (3502.0, [600 * i for i in range(6)]),
        (0.5, [0]),
        (86_400.0, [14_400 * i for i in range(7)]),
        (30 * 86_400.0, [6 * 86_400 * i for i in range(6)]),
    ],
)
def test_time_ticks_are_whole_units(axes: Axes, until: float, ticks: list[float]) -> None:
    time_axis(axes, until)
    assert list(axes.get_xticks()) == pytest.approx(ticks)


@styled
def line() -> str:
    figure = new_figure(200, 100, "a line")
    add_axes(figure, 20, 40, 170, 50).plot([0.0, 1.0], [0.0, 1.0])
    return to_svg(figure)


def test_the_same_chart_is_the_same_svg_without_a_date() -> None:
    assert line() == line() and "<dc:date>" not in line()


NAMES = ("a", "b & c")


def test_each_value_has_a_bar_and_a_label() -> None:
    panels = [ChartPanel("one", (1.0, 2.0)), ChartPanel("two", (0.0, 3.0), 1.5)]
    svg = bars("loads < 1", NAMES, panels)
    assert svg == bars("loads < 1", NAMES, panels)
    root = ElementTree.fromstring(svg)  # noqa: S314 - written above
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"loads < 1", "one", "two", "a", "b & c", "0", "1", "2", "3"} == set(texts)


def test_bars_of_zeros_are_drawn() -> None:
    assert "none" in bars("zeros", NAMES, [ChartPanel("none", (0.0, 0.0))])
