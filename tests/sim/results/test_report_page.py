"""The report in a real browser: no request, no clipped text, and decisions with tooltips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from policy.config.control import SloConfig
from sim.charts.page import page
from sim.oracle.offline_optimum import GpuHourBounds
from sim.results.chart_series import chart_data
from sim.results.run_summary import PolicyComparison, PolicyRun, summarise
from sim.simulator.run_record import RequestOutcome, RunRecord
from tests.sim.charts.chromium import NAMES, Chromium, found
from tests.sim.records import NAN, moment, record, requests

PROGRAM = found()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason=f"no browser on PATH: {', '.join(NAMES)}"),
]
# As long as the names of policies with parameters.
NAMED = 'policy {} {{"metric":"concurrency","target":12}}'
TIP = "document.getElementById('tip')"
# Texts that overlap, leave their chart, or are too small to be read.
UNREADABLE = """
[...document.querySelectorAll("svg.chart")].flatMap(chart => {
  const frame = chart.getBoundingClientRect();
  const texts = [...chart.querySelectorAll("text")].map(text => [text.textContent,
    text.getBoundingClientRect(), parseFloat(getComputedStyle(text).fontSize) * frame.width / 560]);
  const out = ([, box]) => frame.left - 1 > box.left || box.right > frame.right + 1
    || frame.top - 1 > box.top || box.bottom > frame.bottom + 1;
  const meet = ([, a], [, b]) => b.right > a.left && a.right > b.left
    && b.bottom > a.top + 3 && a.bottom > b.top + 3;
  return texts.flatMap((text, i) => [
    ...(out(text) ? [text[0] + " is cut off"] : []), ...(text[2] < 8 ? [text[0] + " is small"] : []),
    ...texts.slice(i + 1).filter(other => meet(text, other)).map(other => text[0] + " is on " + other[0]),
  ]);
})
"""
# Names that do not fit into their cell of the table.
OVERFULL = """
[...document.querySelectorAll("th, td")].filter(cell => cell.scrollWidth > cell.clientWidth + 1)
  .map(cell => cell.textContent)
"""


def study(*records: RunRecord) -> PolicyComparison:
    runs = tuple(
        PolicyRun(NAMED.format(i), summarise(each, None), chart_data(each)) for i, each in enumerate(records)
    )
    objectives = {"m": SloConfig(ttft_p95_s=1.5, itl_p95_s=0.1)}
    return PolicyComparison("trace.csv", 3, GpuHourBounds(why="not asked for"), objectives, runs)


def unserved() -> RunRecord:
    table = requests([0.5, 1.5], [NAN, NAN], outcome=[RequestOutcome.REFUSED] * 2, met=[False] * 2)
    return RunRecord(
        ends_at=60.0, requests={"m": table}, moments=[moment(5.0 * i, met=0.0) for i in range(1, 13)]
    )


def brief() -> RunRecord:
    return RunRecord(ends_at=0.4, requests={"m": requests([0.1], [0.2])}, moments=[moment(0.0)])


STUDIES = {
    "one": study(record(minutes=60)),
    "seven": study(*[record(minutes=60)] * 7),
    "unserved": study(unserved()),
    "brief": study(brief()),
    "days": study(replace(record(), ends_at=40 * 86_400.0)),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert PROGRAM is not None
    browser = Chromium(PROGRAM, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, each in STUDIES.items():
        (folder / f"{name}.html").write_text(page(each), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in STUDIES}


@pytest.mark.parametrize("width", [360, 600, 1400, 2560])
@pytest.mark.parametrize("name", STUDIES)
def test_no_text_overlaps_or_is_cut(browser: Chromium, pages: dict[str, Path], name: str, width: int) -> None:
    browser.open(pages[name], width)
    assert browser.requested() == [pages[name].as_uri()] and browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(UNREADABLE) == []
    assert browser.evaluate(OVERFULL) == []


def test_the_content_security_policy_forbids_requests(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    browser.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/'})); null")
    browser.picture()  # by when it has been drawn, it has been refused
    assert "Content Security Policy" in str(browser.complaints())


def place(browser: Chromium, selector: str) -> tuple[float, float]:
    x, y = browser.evaluate(
        f"(() => {{ const found = document.querySelector({selector!r});"
        "found.scrollIntoView({block: 'center', inline: 'center'});"
        "const box = found.getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
    )
    return x, y


def tip(browser: Chromium) -> str:
    box = browser.evaluate(f"{TIP}.getBoundingClientRect().toJSON()")
    width, height = browser.evaluate("[innerWidth, innerHeight]")
    assert min(box["left"], box["top"]) >= 0 and box["right"] <= width and box["bottom"] <= height
    assert browser.evaluate(f"getComputedStyle({TIP}).visibility") == "visible"
    return str(browser.evaluate(f"{TIP}.textContent"))


@pytest.mark.parametrize("width", [360, 600, 1400])
def test_hovering_explains_a_decision(browser: Chromium, pages: dict[str, Path], width: int) -> None:
    browser.open(pages["seven"], width)
    x, y = place(browser, "#chart-2-1 .mark")
    # Above the triangle too, which is small.
    for above in (0, 40):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y - above)
        tooltip = tip(browser)
        assert "policy 2" in tooltip and "mode  multi-replica" in tooltip and "desired" in tooltip
        assert "multi-replica x 1 → multi-replica x 2: up to 3 requests/s <are> expected" in tooltip
        assert "step: 5 → 2, at most doubled" in tooltip
    values = browser.evaluate("[...document.querySelectorAll('section .legend b')].map(b => b.textContent)")
    assert len(values) == 7 * 14 and all(values)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.evaluate(f"getComputedStyle({TIP}).visibility") == "hidden"


def test_the_arrow_keys_step_through_decisions(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], 600)
    browser.evaluate("document.getElementById('chart-0-1').focus(); null")

    def press(key: str, modifiers: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers)

    shift = 8
    press("ArrowRight", shift)
    assert "up to 3 requests/s" in tip(browser)
    press("ArrowRight", shift)
    assert tip(browser).startswith("0:30:00") and "promises to cost 20% less" in tip(browser)
    press("ArrowLeft")
    assert tip(browser).startswith("0:29:30")
    press("Escape")
    assert browser.evaluate(f"getComputedStyle({TIP}).visibility") == "hidden"


def test_a_touch_shows_an_instant_until_the_next_touch(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], 400)

    def touch(x: float, y: float) -> None:
        browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    touch(*place(browser, "#chart-0-0"))
    assert "arrivals" in tip(browser)
    touch(*place(browser, "#chart-0-4"))
    assert "running" in tip(browser)
    touch(*place(browser, "h1"))
    assert browser.evaluate(f"getComputedStyle({TIP}).visibility") == "hidden"
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)
