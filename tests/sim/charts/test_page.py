"""The page is well-formed, shows every series and every decision, and loads no external resource."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from policy.config.control import SloConfig
from sim.charts.page import page
from sim.oracle.offline_optimum import GpuHourBounds
from sim.results.chart_series import chart_data
from sim.results.run_summary import PolicyComparison, PolicyRun, summarise
from sim.simulator.run_record import RunRecord
from tests.sim.records import record, requests

BOUNDS = GpuHourBounds(lower_gpu_hours=0.8, achievable_gpu_hours=0.9)
CHARTS = ("Load", "Replicas and mode", "Time to first token", "Inter-token latency", "Queue", "Within")
SERIES = (
    ["arrivals"],
    ["ready", "starting", "draining", "desired"],
    ["p99", "p90", "p50"],
    ["p99", "p90", "p50"],
    ["queued in the gateway", "running"],
    ["met"],
)


def study(*records: RunRecord, bounds: GpuHourBounds = BOUNDS) -> PolicyComparison:
    runs = tuple(
        PolicyRun(f"policy <{i}>", summarise(each, bounds.lower_gpu_hours), chart_data(each))
        for i, each in enumerate(records)
    )
    return PolicyComparison("a & b.csv", 3, bounds, {"m": SloConfig(ttft_p95_s=1.5)}, runs)


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314 - written above


@pytest.fixture(scope="module")
def text() -> str:
    return page(study(record(), record(minutes=20)))


@pytest.mark.slow
def test_the_page_is_one_file_without_external_resources(text: str) -> None:
    root = parsed(text)
    assert not re.search(r"//\w|url\(|@import|<link|src=", text)
    assert "prefers-color-scheme: dark" in text and root.get("lang") == "en"
    assert root.findtext("head/title") == "policy <0>, policy <1> on a & b.csv"


def test_the_page_has_a_column_with_every_series_for_each_policy(text: str) -> None:
    root = parsed(text)
    sections = root.findall(".//section")
    assert [section.findtext("h2") for section in sections] == ["policy <0>", "policy <1>"]
    values = json.loads(root.findtext(".//script[@id='values']") or "")["charts"]
    for section in sections:
        charts = section.findall("svg")
        assert len(charts) == len(CHARTS)
        for chart, title, names in zip(charts, CHARTS, SERIES, strict=True):
            assert (chart.get("aria-label") or "").startswith(title)
            drawn = chart.findall(".//g[@class='line']")
            assert [group.get("data-name") for group in drawn] == names
            assert all((group.find("path").get("d") or "").startswith("M ") for group in drawn)
            assert [line["name"] for line in values[chart.get("id") or ""]["lines"]] == names
        legends = ["".join(entry.itertext()) for entry in section.findall("ul/li")]
        expected = [list(names) for names in SERIES]
        expected[1] += ["multi-replica", "single-large"]
        expected[2].append("SLO 1.5 s")
        expected[5].append("SLO 99 % of the last minute")
        assert legends == [entry for each in expected for entry in each]


def test_decisions_are_marked_at_their_instants(text: str) -> None:
    marks = parsed(text).findall(".//g[@class='mark']")
    assert [mark.get("data-at") for mark in marks] == ["150.000", "300.000", "300.000", "600.000"]
    title = marks[0].findtext("title") or ""
    assert "up to 3 requests/s <are> expected & need 5" in title and "step: 5 → 2, at most doubled" in title


@pytest.mark.slow
def test_a_mode_has_the_same_colour_in_all_columns() -> None:
    later = record()
    whole = replace(later, moments=[replace(each, mode="single-large") for each in later.moments])
    tints = {
        ((dwell.findtext("title") or "").partition(" from")[0], dwell.find("path").get("style"))
        for dwell in parsed(page(study(record(), whole))).findall(".//g[@class='dwell']")
    }
    assert tints == {("multi-replica", "fill: var(--m0)"), ("single-large", "fill: var(--m1)")}


def test_all_columns_have_one_time_axis_and_one_scale(text: str) -> None:
    root = parsed(text)
    assert {chart.get("data-until") for chart in root.findall(".//svg[@class='chart']")} == {"1200"}
    for index in range(len(CHARTS)):
        ticks = [
            [tick.text for tick in root.findall(f".//svg[@id='chart-{column}-{index}']//text")]
            for column in (0, 1)
        ]
        assert ticks[0] == ticks[1]


def test_the_table_is_above_the_charts_and_has_the_bounds(text: str) -> None:
    rows = {
        row.findtext("th"): [cell.text for cell in row.findall("td")] for row in parsed(text).findall(".//tr")
    }
    assert rows["attainment"] == ["99.67%", "99.83%"]
    assert rows["over the lower bound"] == ["1.25x", "1.25x"]
    assert rows["over the clairvoyant plan"] == ["1.11x", "1.11x"]
    assert "at least 0.800 GPU-hours, 0.900 by a clairvoyant plan" in text


def test_without_bounds_the_page_says_so() -> None:
    text = page(study(record(), bounds=GpuHourBounds(why="not asked for")))
    assert "no bounds: not asked for" in text and "over the lower bound" not in text


def test_an_empty_run_is_drawn() -> None:
    root = parsed(page(study(RunRecord(ends_at=0.0, requests={"m": requests([], [])}))))
    assert "ready (none)" in ["".join(entry.itertext()) for entry in root.findall(".//li")]


@pytest.mark.slow
def test_several_models_have_charts_of_their_own() -> None:
    one = record()
    both = replace(one, requests={"m": one.requests["m"], "n": requests([1.0], [0.5])})
    labels = [chart.get("aria-label") or "" for chart in parsed(page(study(both))).findall(".//section/svg")]
    assert [label.partition(" over")[0] for label in labels if label.startswith("Load")] == [
        "Load of m",
        "Load of n",
    ]


@pytest.mark.slow
def test_the_page_of_a_day_under_five_policies_is_below_600_kb() -> None:
    # Half a megabyte for a day under five policies, so that it can be sent by mail.
    assert len(page(study(*[record(minutes=1440)] * 5))) < 600_000
