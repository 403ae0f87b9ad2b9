"""A downsampled series has few points and keeps all extremes."""

from __future__ import annotations

import numpy as np
import pytest

from sim.results.chart_series import (
    LATENCY_WINDOWS,
    MARKS,
    MAX_DECISIONS,
    WINDOWS,
    chart_data,
    clock,
    decisions_of,
)
from sim.simulator.run_record import RunRecord
from tests.sim.records import NAN, STEP, decision, moment, record, requests


def test_a_short_run_has_a_point_for_each_tick() -> None:
    (found,) = chart_data(record())
    assert found.model == "m" and found.ends_at == 600.0
    assert len(found.ready) == 121 and set(found.ready) == {1.0, 2.0}
    assert [stay.mode for stay in found.stays] == ["multi-replica", "single-large"]
    assert (found.stays[0].end, found.stays[1].start, found.stays[1].end) == (300.0, 300.0, 600.0)
    assert np.isnan(found.met[0]) and found.met[1] == 0.9
    # 300 requests in 120 windows: the median of two or three that come after each other.
    assert len(found.ttft.p50) == LATENCY_WINDOWS and np.nanmax(found.ttft.p99) == pytest.approx(
        1.9, abs=0.01
    )
    assert np.all(found.ttft.p50 <= found.ttft.p99)


@pytest.mark.slow
def test_a_downsampled_run_keeps_its_peaks() -> None:
    queued = np.zeros(20_000)
    queued[12_345] = 77
    moments = [moment(5.0 * i, queued=int(each), wanted=3) for i, each in enumerate(queued)]
    decisions = [(5.0 * i, decision(1, 2, f"reason {i}")) for i in range(20_000)]
    table = requests(np.arange(0.0, 1e5, 1.0), np.full(100_000, 0.1))
    (found,) = chart_data(RunRecord(ends_at=1e5, requests={"m": table}, moments=moments, decisions=decisions))
    assert len(found.queued) == WINDOWS and np.max(found.queued) == 77
    assert len(found.marks) == MARKS and found.marks[1].text.count("reason") == MAX_DECISIONS
    assert "and 121 more until" in found.marks[1].text
    assert np.all(found.wanted == 3)


def test_a_model_without_requests_or_ticks_is_drawn_empty() -> None:
    (found,) = chart_data(RunRecord(ends_at=10.0, requests={"m": requests([], [])}))
    for values in (found.arrivals, found.queued, found.ready, found.ttft.p50):
        assert len(values) == 1 and np.isnan(values).all()
    assert found.stays == () and found.marks == ()


def test_windows_without_served_requests_are_gaps() -> None:
    (found,) = chart_data(RunRecord(ends_at=3.0, requests={"m": requests([0.5, 1.5, 2.5], [0.1, NAN, 0.3])}))
    assert found.ttft.p50 == pytest.approx([0.1, NAN, 0.3], nan_ok=True)


def test_a_decision_names_its_change_and_the_guardrail_that_limited_it() -> None:
    assert decisions_of(3725.0, decision(1, 2, "it grows", STEP)) == (
        "1:02:05 multi-replica x 1 → multi-replica x 2: it grows\n  step: 5 → 2, at most doubled"
    )
    assert clock(59.99) == "0:00:59"
