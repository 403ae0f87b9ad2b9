"""Heartbeats of replicas as samples of those that are ready."""

from __future__ import annotations

from typing import Any

import pytest

from policy.signals.aggregator import SignalAggregator
from policy.signals.heartbeat_metrics import SILENT_S, ReplicaMetrics
from policy.signals.types import ReplicaSample
from policy.types import Replica, ReplicaLoad, ReplicaPhase
from policy.wire.controller_reports import EngineReport, GpuReport
from policy.wire.heartbeat import Heartbeat

T = 1000.0


def beat(
    name: str = "r1",
    *,
    state: ReplicaPhase = ReplicaPhase.READY,
    incarnation: int = 0,
    engine: EngineReport | None = None,
    power: GpuReport | None = None,
    **load: Any,
) -> Heartbeat:
    replica = Replica(
        id=name, model="m", shape="s", generation=1, state=state, incarnation=incarnation, pid=7,
        load=ReplicaLoad(at=0.0, **load),
    )  # fmt: skip
    return Heartbeat(replica=replica, engine=engine, gpus=power)


def taken(*beats: Heartbeat) -> ReplicaMetrics:
    """The metrics after ``beats`` at :data:`T` and each second after it."""
    metrics = ReplicaMetrics()
    for i, each in enumerate(beats):
        metrics.take(each, T + i)
    return metrics


def only(metrics: ReplicaMetrics, at: float) -> ReplicaSample:
    (figures,) = metrics.figures("m", at)
    return figures


def test_a_sample_has_the_load_and_its_age() -> None:
    seen = only(taken(beat(running=3, waiting=2, kv_used=0.4)), T + 1.5)
    assert (seen.id, seen.age_s, seen.running, seen.waiting, seen.kv_used) == ("r1", 1.5, 3, 2, 0.4)
    assert (seen.tokens_per_s, seen.slowness, seen.watts, seen.celsius) == (0.0, 1.0, None, None)


def test_token_and_preemption_rates_are_of_the_last_seconds() -> None:
    metrics = ReplicaMetrics()
    for half in range(40):
        tokens = 50 * half if half < 20 else 1000 + 150 * (half - 20)
        metrics.take(beat(tokens=tokens, engine=EngineReport(preempted=half // 2)), T + half / 2)
    seen = only(metrics, T + 19.5)
    assert seen.tokens_per_s == pytest.approx(300.0)
    assert seen.preempted_per_s == pytest.approx(1.0, rel=0.2)


def test_heartbeats_in_a_burst_share_a_mark() -> None:
    metrics = ReplicaMetrics()
    for i in range(1000):
        metrics.take(beat(tokens=i), T + i / 1000)
    assert only(metrics, T + 1).tokens_per_s == pytest.approx(1000.0, rel=0.02)
    assert len(metrics._replicas["r1"].marks) <= 4


def test_counts_of_a_restarted_engine_begin_at_its_start() -> None:
    before = beat(tokens=9_000_000, engine=EngineReport(preempted=50))
    metrics = taken(before, beat(tokens=100, incarnation=1))
    assert only(metrics, T + 1).tokens_per_s == 0.0
    metrics.take(beat(tokens=300, incarnation=1), T + 2)
    assert only(metrics, T + 2).tokens_per_s == 200.0


def test_counts_before_the_first_engine_report_are_not_a_rate() -> None:
    metrics = taken(beat(), beat(engine=EngineReport(preempted=500)))
    assert only(metrics, T + 1).preempted_per_s == 0.0
    metrics.take(beat(engine=EngineReport(preempted=502)), T + 2)
    assert only(metrics, T + 2).preempted_per_s == 2.0


def test_the_last_engine_and_power_reports_are_kept_until_the_next() -> None:
    power = GpuReport(watts=300.0, celsius=71.0, throttled="sw_power_cap")
    seen = only(taken(beat(engine=EngineReport(deferred=2), power=power), beat()), T + 1)
    assert (seen.deferred, seen.watts, seen.celsius, seen.throttled) == (2, 300.0, 71.0, "sw_power_cap")


def test_gpu_reports_are_kept_by_replica_until_it_is_silent() -> None:
    metrics, power = ReplicaMetrics(), GpuReport(watts=300.0, ecc_corrected=3)
    metrics.take(beat("b", power=power), T)
    metrics.take(beat("a"), T)
    assert metrics.gpus(T + SILENT_S) == {"b": power}
    assert metrics.gpus(T + SILENT_S + 1) == {}


def test_only_ready_replicas_have_samples() -> None:
    metrics = ReplicaMetrics()
    metrics.take(beat("b"), T)
    metrics.take(beat("a"), T)
    metrics.take(beat("starts", state=ReplicaPhase.STARTING), T)
    metrics.take(beat("leaves", state=ReplicaPhase.DRAINING), T)
    assert [one.id for one in metrics.figures("m", T)] == ["a", "b"]
    assert metrics.figures("other", T) == ()
    metrics.take(beat("b", state=ReplicaPhase.STOPPED), T + 1)
    assert [one.id for one in metrics.figures("m", T + 1)] == ["a"]


def test_a_silent_replica_is_dropped() -> None:
    aggregator = SignalAggregator()
    aggregator.take_beat(beat("silent"), T)
    assert len(aggregator.signals("m", T + SILENT_S).replicas) == 1
    assert aggregator.signals("m", T + SILENT_S + 1).replicas == ()


@pytest.mark.parametrize(
    ("power", "throttled"),
    [
        (GpuReport(watts=0.0, xid=79, card="GPU 3"), "XID 79 on GPU 3"),
        (GpuReport(watts=0.0, xid=79, throttled="heat"), "XID 79 on a card, heat"),
        (GpuReport(watts=0.0, xid=31, card="GPU 3"), ""),
    ],
)
def test_a_gpu_error_is_reported_with_the_throttling(power: GpuReport, throttled: str) -> None:
    assert only(taken(beat(power=power)), T).throttled == throttled
