"""The controller's samples: targets, decisions, replicas with their GPUs, adapters, and its own process."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.types import ReplicaLoad, ReplicaPhase
from policy.wire.controller_reports import EngineReport, GatewayReport, GpuReport, ModelReport
from policy.wire.heartbeat import Heartbeat
from policy.wire.metric_definitions import ADAPTERS, CONTROL, PROCESSES, REPLICAS, Samples
from tests.serve.plane import Plane
from tests.serve.replicas import replica
from tests.serve.sim_documents import document

OWN = {metric.name for metric in (*CONTROL, *REPLICAS, *ADAPTERS, *PROCESSES)}


async def collected(plane: Plane) -> dict[str, dict[tuple[str, ...], float]]:
    async with plane.client() as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    samples = msgspec.json.decode(answer.content, type=Samples)
    assert samples.keys() <= OWN
    return {name: dict(values) for name, values in samples.items()}


def beat(plane: Plane, **over: Any) -> None:
    load = ReplicaLoad(at=0.0, running=3, waiting=1, in_flight=4, bound=8, kv_used=0.5, tokens=700)
    power = GpuReport(watts=250.0, joules=9e4, celsius=61.0, reasons=0x40, xid=79, clock_mhz=900, nvlink_rx=5)
    engine = EngineReport(deferred=1, preempted=2)
    running = replica(load=load, **over)
    plane.controller.beat(Heartbeat(replica=running, engine=engine, gpus=power))


async def test_targets_replicas_and_signals(plane: Plane) -> None:
    await plane.ready(document())
    report = GatewayReport(worker="w", number=1, since_s=10.0, models={"m": ModelReport(arrived=40)})
    plane.controller.signals(report)
    found = await collected(plane)
    assert found["tidegate_replicas_target"] == {("m",): 1.0}
    assert found["tidegate_mode"] == {("m", "multi-replica"): 1.0, ("m", "single-large"): 0.0}
    assert found["tidegate_settled"] == {("m",): 1.0}
    assert found["tidegate_override"] == {("m",): 0.0}
    states = found["tidegate_replicas"]
    assert states["m", "small", "ready"] == 1.0
    assert {state for _, _, state in states} == {str(s) for s in ReplicaPhase} - {"stopped"}
    assert found["tidegate_signals_age_seconds"] == {("m",): 0.0}
    assert found["tidegate_arrival_rate"]["m",] > 0.0
    plane.controller.scale("m", 2)
    assert (await collected(plane))["tidegate_override"] == {("m",): 1.0}


async def test_a_target_without_a_replica_has_counts_of_zero(plane: Plane) -> None:
    await plane.up(document())
    found = await collected(plane)
    assert found["tidegate_replicas_target"] == {("m",): 1.0}
    assert found["tidegate_replicas"]["m", "small", "ready"] == 0.0


async def test_decisions_are_counted(plane: Plane) -> None:
    await plane.ready(document())
    plane.controller.autoscaler.decide_soon("m", urgent=True)
    await plane.ticks()
    found = await collected(plane)
    assert found["tidegate_replicas_desired"].keys() == {("m",)}
    assert sum(found["tidegate_decisions"].values()) >= 1.0
    assert {change for _, change, _ in found["tidegate_decisions"]} <= {"none", "up", "down", "mode"}
    assert found["tidegate_decision_age_seconds"]["m",] >= 0.0


async def test_a_replica_and_its_gpus(plane: Plane) -> None:
    await plane.up(document())
    beat(plane)
    plane.now += 1.5
    found = {name: values for name, values in (await collected(plane)).items() if "_replica_" in name}
    mine = ("m", "r1")
    expected = {
        "running": 3, "waiting": 1, "in_flight": 4, "bound": 8, "kv_used_ratio": 0.5, "scheduled_tokens": 700,
        "deferred": 1, "preempted": 2, "adapters": 0, "heartbeat_age_seconds": 1.5,
        "power_watts": 250, "energy_joules": 9e4, "temperature_celsius": 61, "xid": 79,
        "gpu_clock_hertz": 9e8,
    }  # fmt: skip
    assert {name: found[f"tidegate_replica_{name}"][mine] for name in expected} == expected
    links = found["tidegate_replica_gpu_link_bytes"]
    assert {labels[2:]: value for labels, value in links.items() if value} == {("nvlink", "rx"): 5.0}
    plane.controller.aggregator.energy.spent(replica(), 9e4 + 60.0, plane.now + 60.0)
    assert (await collected(plane))["tidegate_energy_joules"] == {("m", "_idle"): 60.0}
    throttled = found["tidegate_replica_throttled"]
    assert [reason for (*_, reason), value in throttled.items() if value] == ["hardware thermal slowdown"]


async def test_the_kv_cache_and_power_of_a_replica_that_sleeps_are_not_counted(plane: Plane) -> None:
    await plane.up(document())
    beat(plane)
    beat(plane, name="r2", state=ReplicaPhase.ASLEEP)
    found = await collected(plane)
    for name in ("kv_used_ratio", "power_watts", "energy_joules"):
        assert found[f"tidegate_replica_{name}"].keys() == {("m", "r1")}, name
    assert found["tidegate_replica_temperature_celsius"].keys() == {("m", "r1"), ("m", "r2")}


async def test_engines_that_were_started_again_are_counted(plane: Plane) -> None:
    await plane.up(document())
    for incarnation in (0, 1, 1, 3):
        beat(plane, incarnation=incarnation)
    assert (await collected(plane))["tidegate_engine_restarts"] == {("m",): 3.0}


async def test_the_process_reports_itself(plane: Plane) -> None:
    await plane.up(document())
    found = await collected(plane)
    assert found["tidegate_process_resident_memory_bytes"]["controller",] > 1e6
    assert (
        found["tidegate_process_open_fds"]["controller",] <= found["tidegate_process_max_fds"]["controller",]
    )


@pytest.mark.parametrize("seconds", [(), (0.2, 0.3)])
async def test_turns_of_the_loop_are_counted(plane: Plane, seconds: tuple[float, ...]) -> None:
    await plane.up(document())
    for each in seconds:
        plane.controller.metrics.ticked(each)
    found = await collected(plane)
    assert found["tidegate_controller_ticks"] == {(): len(seconds)}
    assert found["tidegate_controller_tick_seconds"] == {(): pytest.approx(sum(seconds))}
