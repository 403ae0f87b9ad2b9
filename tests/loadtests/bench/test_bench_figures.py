"""Figures and slopes, and their table and plot."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from loadtests.bench.median_and_range import MedianAndRange, slope, table
from loadtests.bench.report import plot


def test_a_figure_shows_median_and_range() -> None:
    figure = MedianAndRange.of([0.003, 0.001, 0.002])
    assert figure.text(1, 1e3) == "2.0 (1.0-3.0)"
    assert MedianAndRange.of([5.0]).text() == "5"


def test_the_fitted_slope_of_a_line_is_exact() -> None:
    assert slope([0, 1, 2], [5, 7, 9]) == pytest.approx(2.0)
    assert slope([1], [1]) == 0.0


def test_a_table_has_a_row_for_each_measurement() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_a_plot_has_a_bar_for_each_figure_and_names_every_system() -> None:
    one, two = MedianAndRange(1, 1, 2), MedianAndRange(10, 8, 12)
    svg = plot("A < B", {"x": {"tidegate": one, "other": two}, "y": {"other": one}})
    texts = [each.text for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314
    assert texts.count("tidegate") == texts.count("other") == 1
    assert {"A < B", "x", "y"} <= set(texts) and [texts.count(value) for value in ("1", "10")] == [2, 1]
