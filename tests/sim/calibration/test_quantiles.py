"""Latencies of the live replica and of the simulator, compared and plotted."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from sim.calibration.quantiles import compare, curves

LIVE = {"ttft": [float(i) for i in range(101)], "itl": [math.nan, 0.02]}


def test_errors_of_the_simulator_are_relative_and_signed() -> None:
    found = compare(LIVE, {"ttft": [2.0 * i for i in range(101)], "itl": [0.01]})
    assert (found["ttft"]["p50"].live, found["ttft"]["p50"].simulated) == (50.0, 100.0)
    assert found["ttft"]["p90"].error == pytest.approx(1.0)
    assert found["itl"]["p99"].error == pytest.approx(-0.5)


def test_a_measure_without_values_on_one_side_is_left_out() -> None:
    assert list(compare(LIVE, {"ttft": [1.0], "itl": [math.nan]})) == ["ttft"]


def test_a_live_value_of_zero_has_no_relative_error() -> None:
    assert compare({"ttft": [0.0]}, {"ttft": [1.0]})["ttft"]["p50"].error == 0.0


def test_the_plot_has_two_curves_for_each_measure() -> None:
    root = ElementTree.fromstring(curves("a <title>", LIVE, {"ttft": [0.0, 3.0], "itl": [0.01]}))  # noqa: S314
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <title>", "TTFT", "ITL", "live", "simulated"} <= set(texts)
