"""A chart of bars names its panels and contenders, and is the same for the same values."""

from __future__ import annotations

from xml.etree import ElementTree

from sim.charts.figure import Panel, bars

NAMES = ("a", "b & c")


def test_each_value_has_its_bar_and_its_number() -> None:
    panels = [Panel("one", (1.0, 2.0)), Panel("two", (0.0, 3.0), 1.5)]
    svg = bars("loads < 1", NAMES, panels)
    assert svg == bars("loads < 1", NAMES, panels)
    root = ElementTree.fromstring(svg)  # noqa: S314 - written above
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"loads < 1", "one", "two", "a", "b & c", "0", "1", "2", "3"} == set(texts)


def test_nothing_but_zeros_is_drawn_too() -> None:
    assert "none" in bars("zeros", NAMES, [Panel("none", (0.0, 0.0))])
