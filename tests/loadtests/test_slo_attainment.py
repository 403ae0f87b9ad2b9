"""SLO attainment and sums of a run, its tables, and the comparison with the gateway."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask
from prometheus_client import generate_latest

from gateway.telemetry.metrics import WorkerMetrics
from loadtests import metrics_check, report
from loadtests.metrics_check import compare, read, settled
from loadtests.options import prompt
from loadtests.slo_attainment import RequestMeasurement, RequestSlo, RunStatistics

OBJECTIVE = RequestSlo(ttft_s=0.5, itl_s=0.05)


def stream(ttft_s: float, itl_s: float, **more: object) -> RequestMeasurement:
    return RequestMeasurement("chat, streamed", e2e_s=2.0, ttft_s=ttft_s, itl_s=itl_s, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "met"),
    [
        (stream(0.5, 0.05), True),
        (stream(0.51, 0.01), False),
        (stream(0.1, 0.051), False),
        (stream(0.1, 0.01, error="cut"), False),
        (stream(0.1, 0.01, aborted=True), False),
        (RequestMeasurement("chat, whole", e2e_s=0.95, tokens=10), True),
        (RequestMeasurement("chat, whole", e2e_s=0.96, tokens=10), False),
    ],
)
def test_an_outcome_meets_the_objective_within_all_its_limits(outcome: RequestMeasurement, met: bool) -> None:
    assert OBJECTIVE.met(outcome) is met


def example_run() -> RunStatistics:
    """Two streams of which one is slow, a whole answer, a failure and a client that left, in 4 s."""
    ledger = RunStatistics()
    ledger.begin(100.0)
    for ttft_s in (0.2, 0.6, 0.1):
        ledger.first_event("chat, streamed", ttft_s)
    outcomes = [
        stream(0.2, 0.02, gap_s=0.03, gaps=(0.02, 0.04), prompt_tokens=10, tokens=20),
        stream(0.6, 0.02, gap_s=0.03, gaps=(0.03,), tokens=20),
        stream(0.1, 0.02, aborted=True),
        RequestMeasurement("chat, whole", e2e_s=1.0, tokens=40),
        RequestMeasurement("chat, whole", e2e_s=9.0, error="503: queue full"),
    ]
    for at, outcome in enumerate(outcomes):
        ledger.end(outcome, OBJECTIVE, 100.0 + at)
    return ledger


def test_failures_count_against_attainment_and_clients_that_left_do_not() -> None:
    ledger = example_run()
    total = ledger.total()
    assert (total.requests, total.served, total.aborted, total.met) == (4, 3, 1, 2)
    assert total.attainment == 0.5
    # Without the 9 s of the failure.
    assert total.e2e_s == 5.0
    assert (total.begun, total.gaps, total.tokens) == (3, 3, 80)
    assert ledger.seconds == 4.0


def test_counts_of_workers_are_merged() -> None:
    master, worker = RunStatistics(), example_run()
    master.begin(50.0)
    master.put(worker.take(), 52.0)
    master.put(worker.take(), 60.0)
    assert master.total() == example_run().total()
    assert master.seconds == 2.0, "an empty report does not extend the run"


def test_the_table_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = example_run()
    streamed, whole, every = report.rows(ledger)
    assert (streamed["ttft"], streamed["goodput"], streamed["met"]) == ("300.0", "0.25", "50.0")
    assert (whole["ttft"], whole["failed"]) == ("", "1")
    assert (every["user"], every["requests"], every["output"]) == ("all", "4", "20.00")
    report.show(ledger, OBJECTIVE, [], "no admin port")
    printed = capsys.readouterr().out
    assert "TTFT <= 0.5 s and mean ITL <= 0.05 s" in printed
    assert "no admin port" in printed
    report.save(str(tmp_path / "run"), ledger, [])
    assert (tmp_path / "run_slo.csv").read_text().count("\n") == 4
    assert not (tmp_path / "run_gateway.csv").exists()


def test_a_run_without_requests_has_a_table() -> None:
    (every,) = report.rows(RunStatistics())
    assert (every["requests"], every["goodput"], every["met"]) == ("0", "", "")


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> WorkerMetrics:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    return WorkerMetrics()


def samples(metrics: WorkerMetrics) -> Counter[metrics_check.Key]:
    metrics.publish()
    return read(generate_latest(SimpleNamespace(collect=metrics.collect)).decode(), "m")


def test_gateway_metrics_match_the_users_measurements(metrics: WorkerMetrics) -> None:
    meter = metrics.model("m")
    route = ("/v1/chat/completions", "ok")
    # Earlier requests and other models do not count.
    meter.requests[route] += 5
    meter.ttft.add(40.0)
    meter.served_stream(0.1, 0.01)
    metrics.model("other").requests[route] += 9
    before = samples(metrics)
    for ttft_s in (0.2, 0.6, 0.1):
        meter.ttft.add(ttft_s)
    for gap_s in (0.02, 0.04, 0.03):
        meter.itl.add(gap_s)
    for e2e_s in (2.0, 2.0, 1.0):
        meter.e2e.add(e2e_s)
    meter.requests[route] += 3
    meter.requests[("/v1/chat/completions", "cancelled")] += 1
    meter.served_stream(0.2, 0.03)
    meter.served_stream(0.6, 0.03)
    compared = compare(before, samples(metrics), example_run(), OBJECTIVE)
    assert [row.name for row in compared][-1] == "goodput of streams"
    assert [row.difference for row in compared] == pytest.approx([0.0] * 6)
    assert [row.gateway for row in compared] == pytest.approx([300.0, 30.0, 5000 / 3, 3, 3, 0.25])


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "met"),
    # 0.45 s halves the bucket from 0.4 to 0.5 s, 0.035 s that from 0.03 to 0.04 s.
    [(0.5, 1.0, 10.0), (0.45, 1.0, 5.0), (0.4, 1.0, 0.0), (0.5, 0.035, 5.0), (0.45, 0.035, 2.5)],
)
def test_a_limit_within_a_bucket_makes_no_difference_between_users_and_gateway(
    metrics: WorkerMetrics, ttft_s: float, itl_s: float, met: float
) -> None:
    ledger, limits = RunStatistics(), RequestSlo(ttft_s=ttft_s, itl_s=itl_s)
    ledger.begin(0.0)
    before = samples(metrics)
    for of_stream_s in (*(10 * [0.45]), 1000.0):
        metrics.model("m").served_stream(of_stream_s, 0.032)
        # The time per token is not the gap between events, of which each may have several.
        ledger.end(stream(of_stream_s, 0.001, gap_s=0.033), limits, 1.0)
    row = compare(before, samples(metrics), ledger, limits)[-1]
    assert (row.users, row.gateway) == pytest.approx((met, met))


def test_metrics_are_read_when_every_worker_has_published() -> None:
    busy: metrics_check.Key = ("tidegate_in_flight", ())
    served: metrics_check.Key = ("tidegate_requests_total", ())
    readings = [
        Counter({busy: 1, served: 1}),
        Counter({busy: 1, served: 1}),
        Counter({busy: 0, served: 1}),
        Counter({busy: 0, served: 2}),
        Counter({busy: 0, served: 2}),
        Counter({busy: 0, served: 3}),
    ]
    assert settled(iter(readings).__next__, sleep=lambda _: None)[served] == 2


def test_prompts_share_no_prefix_and_have_their_length() -> None:
    one, other = prompt(100, 1), prompt(100, 2)
    assert one.split()[0] != other.split()[0]
    assert 90 <= len(one.split()) <= 110
    assert prompt(1, 0)


def test_the_locust_page_has_a_tab_with_the_slo_table() -> None:
    app = Flask("page")
    app.add_url_rule("/stats/requests", "stats", lambda: {"state": "running"})
    app.add_url_rule("/other", "other", lambda: {"state": "running"})
    ledger = RunStatistics()
    ledger.begin(0.0)
    ledger.end(
        RequestMeasurement("chat, whole", e2e_s=1.0, tokens=30), RequestSlo(ttft_s=1.0, itl_s=0.05), 2.0
    )
    page: Any = SimpleNamespace(app=app, template_args={"kept": 1})
    report.add_web_tab(page, ledger)
    (table,) = page.template_args["extended_tables"]
    assert page.template_args["kept"] == 1
    assert [column["key"] for column in table["structure"]] == list(report.COLUMNS)

    client = app.test_client()
    document = client.get("/stats/requests").get_json()
    assert document == {
        "state": "running",
        "extended_stats": [{"key": table["key"], "data": report.rows(ledger)}],
    }
    assert client.get("/other").get_json() == {"state": "running"}
    heads, *lines = client.get(page.template_args["extended_csv_files"][0]["href"]).text.splitlines()
    assert heads.startswith("User,Requests")
    assert lines[0].startswith('"chat, whole",1,0,0')
