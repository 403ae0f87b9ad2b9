"""The plot is a well-formed SVG with a bar for each value."""

from __future__ import annotations

from xml.etree import ElementTree

from sim.charts.bars import Panel, bars

NAMES = ("a", "b & c")


def test_each_value_is_a_bar_and_a_bound_is_a_line() -> None:
    svg = bars("loads < 1", NAMES, [Panel("one", (1.0, 2.0)), Panel("two", (0.0, 3.0), 1.5)])
    root = ElementTree.fromstring(svg)  # noqa: S314 - written above
    kinds = [element.tag.rpartition("}")[2] for element in root]
    assert kinds.count("rect") == 1 + 4 and kinds.count("line") == 1
    texts = [element.text for element in root if element.tag.endswith("text")]
    assert "b & c" in texts and "loads < 1" in texts and "3" in texts


def test_nothing_but_zeros_is_drawn_too() -> None:
    assert 'width="0.0"' in bars("", NAMES, [Panel("none", (0.0, 0.0))])
