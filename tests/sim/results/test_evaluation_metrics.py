"""The score of a run with given requests and replica spans."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from policy.types import StartPath
from sim.results.evaluation_metrics import WINDOW_S, RunInterval, score
from sim.simulator.run_record import HOUR_S, ReplicaLifetime, RequestOutcome, RunRecord
from tests.sim.records import NAN, requests


def span(
    asked_at: float, ended_at: float | None, *, model: str = "m", gpus: int = 2, cpus: int = 8
) -> ReplicaLifetime:
    return ReplicaLifetime(0, model, "small", "s", gpus, cpus, StartPath.CACHED, asked_at, ended_at=ended_at)


def run(
    met: list[bool], *, every_s: float = 1.0, spans: list[ReplicaLifetime] | None = None, gpu_s: float = 0.0
) -> RunRecord:
    at = every_s * np.arange(len(met), dtype=np.float64)
    table = requests(at, np.full(len(met), 0.1), met=met)
    return RunRecord(ends_at=len(met) * every_s, requests={"m": table}, spans=spans or [], gpu_s=gpu_s)


def test_a_score_has_every_metric_of_the_run() -> None:
    table = requests(
        [0.0, 1.0, 2.0, 3.0, 4.0],
        [0.1, 0.3, NAN, NAN, 9.0],
        met=[True, True, False, False, False],
        outcome=[
            RequestOutcome.SERVED,
            RequestOutcome.SERVED,
            RequestOutcome.REFUSED,
            RequestOutcome.EXPIRED,
            RequestOutcome.FAILED,
        ],
    )
    record = RunRecord(ends_at=10.0, requests={"m": table}, spans=[span(0.0, None)], gpu_s=20.0)
    found = score(record, "m")
    assert found.attainment == 0.4
    assert found.gpu_hours == pytest.approx(20.0 / HOUR_S)
    # A request that failed after its first token was not served: its TTFT does not count.
    assert (found.ttft_p50_s, found.ttft_p99_s) == pytest.approx((0.2, 0.298))
    assert found.itl_p95_s == pytest.approx(0.02)
    assert found.goodput_rps == 0.2
    assert found.goodput_per_gpu_hour == pytest.approx(2 / (20.0 / HOUR_S))
    assert (found.requests, found.failed) == (5, 3)


def test_requests_served_by_spillover_are_not_failed() -> None:
    table = requests([0.0], [0.1], met=[False], outcome=[RequestOutcome.SPILLED_OVER])
    found = score(RunRecord(ends_at=1.0, requests={"m": table}), "m")
    assert (found.failed, found.attainment) == (0, 0.0)
    assert math.isnan(found.ttft_p50_s)
    assert math.isnan(found.goodput_per_gpu_hour)
    assert msgspec.to_builtins(found)["requests"] == 1


def test_a_stretch_has_its_own_requests_and_gpu_time() -> None:
    spans = [span(0.0, None), span(50.0, 90.0), span(0.0, 30.0, model="other")]
    record = run([i < 60 for i in range(100)], spans=spans, gpu_s=2 * 170.0)
    record.requests["other"] = record.requests["m"]
    found = score(record, "m", RunInterval(40.0, 80.0))
    assert (found.requests, found.attainment) == (40, 0.5)
    assert found.gpu_hours * HOUR_S == pytest.approx(2 * (40.0 + 30.0))
    assert found.goodput_rps == 0.5
    assert score(record, "m").gpu_hours * HOUR_S == pytest.approx(2 * 140.0)
    assert score(record, "other").gpu_hours * HOUR_S == pytest.approx(2 * 30.0)


def test_cores_count_without_gpus() -> None:
    record = run([True], spans=[span(0.0, None, gpus=0), span(0.5, None, gpus=0, model="other")], gpu_s=12.0)
    assert score(record, "m").gpu_hours * HOUR_S == pytest.approx(8.0)


def test_gpus_shared_by_sleeping_engines_count_once() -> None:
    record = run([True] * 10, spans=[span(0.0, None), span(0.0, None)], gpu_s=20.0)
    assert score(record, "m").gpu_hours * HOUR_S == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        (range(0), 0.0),
        (range(95, 96), WINDOW_S),  # one of a window of 30
        (range(40, 95), 3 * WINDOW_S),  # 30 to 120 s
        ([1, *range(61, 121)], 3 * WINDOW_S),  # 60 to 150 s, and not the first window
        ([100, 290], WINDOW_S),
        ([301], 10.0),  # the last window is short
    ],
)
def test_recovery_is_the_longest_time_below_the_target(missed: range | list[int], expected: float) -> None:
    record = run([i not in missed for i in range(310)])
    assert score(record, "m").recovery_s == pytest.approx(expected)


def test_recovery_depends_on_the_attainment_of_the_slo() -> None:
    record = run([i != 40 for i in range(90)])
    assert score(record, "m", promised=0.99).recovery_s == WINDOW_S
    assert score(record, "m", promised=0.9).recovery_s == 0.0


def test_a_window_without_requests_ends_a_violation() -> None:
    record = run([False, False, True, True], every_s=60.0)
    assert score(record, "m").recovery_s == WINDOW_S


def test_a_stretch_without_requests_is_refused() -> None:
    record = run([True] * 10)
    with pytest.raises(ValueError, match=r"no request of m came from 20 to 30 s"):
        score(record, "m", RunInterval(20.0, 30.0))
    with pytest.raises(ValueError, match=r"from 5 to 5 s: expected a later end"):
        RunInterval(5.0, 5.0)
    with pytest.raises(KeyError):
        score(record, "nobody")
