"""A replica with a failed or throttled GPU is replaced: timelines over replicas in memory."""

from __future__ import annotations

from typing import Any

import pytest

from policy.types import ReplicaPhase
from policy.wire.controller_reports import GpuReport
from tests.serve.plane import READY, SMALL, Plane
from tests.serve.sim_documents import document, sim_model

WELL = GpuReport(watts=300.0)
SLOW = GpuReport(watts=300.0, throttled="hardware thermal slowdown", reasons=0x40)
FAILED = GpuReport(watts=0.0, xid=79, card="GPU 3")


def written(gpus: int, count: int = 2, **scale: Any) -> dict[str, Any]:
    model = sim_model(
        shapes={"small": {"gpus": 1, "cpus": 1}},
        modes={"multi-replica": {"shape": "small", "replicas": count}},
        control={"mode": {"drain_timeout_s": 10}, "start_timeout_s": 60, "scale": scale},
    )
    return document(model, budget={"gpus": gpus})


async def up(plane: Plane, gpus: int, count: int = 2, **scale: Any) -> list[str]:
    await plane.ready(written(gpus, count, **scale))
    assert plane.counts(READY) == {SMALL: count}
    plane.cluster.slow = True
    return [replica.id for replica in plane.cluster.of(SMALL, READY)]


async def seconds(plane: Plane, many: float) -> None:
    await plane.ticks(round(many * 5))


def note(plane: Plane) -> str:
    return plane.controller.status().models[0].note


@pytest.mark.slow
async def test_throttled_replica_is_replaced_after_a_minute(plane: Plane) -> None:
    first, second = await up(plane, gpus=3)
    plane.gpu_reports[first] = SLOW
    await seconds(plane, 58)
    assert plane.counts() == {SMALL: 2}
    await seconds(plane, 4)
    # One starts beside them; none drains yet.
    assert plane.counts(READY) == {SMALL: 2}
    assert plane.counts(ReplicaPhase.STARTING) == {SMALL: 1}
    assert f"{first}: throttled by hardware for 60 s; it is being replaced" in note(plane)
    plane.cluster.ready()
    await seconds(plane, 1)
    (leaving,) = plane.cluster.of(SMALL, ReplicaPhase.DRAINING)
    # Gateways get the reason, and send it no more requests.
    reported = next(r for r in plane.controller.fleet().replicas if r.id == first)
    assert (leaving.id, reported.state, reported.reason) == (
        first,
        "draining",
        "throttled by hardware for 60 s",
    )
    assert plane.counts(READY) == {SMALL: 2}
    plane.cluster.drained()
    await seconds(plane, 5)
    plane.cluster.drained()
    await seconds(plane, 5)
    # Back to the target count: no other replica was drained.
    serving = [replica.id for replica in plane.cluster.of(SMALL, READY)]
    assert len(serving) == 2 and second in serving and first not in serving
    assert plane.counts() == {SMALL: 2}
    assert plane.phase() == "steady"
    events = "\n".join(plane.controller.status().events)
    why = f"m: {first} is replaced after an extra replica is ready: throttled by hardware for 60 s"
    assert why in events
    assert f"m: {first} drains: throttled by hardware for 60 s" in events


async def test_failed_gpu_drains_its_replica_at_once(plane: Plane) -> None:
    first, second = await up(plane, gpus=2)
    plane.gpu_reports[second] = FAILED
    await seconds(plane, 1)
    assert [replica.id for replica in plane.cluster.of(SMALL, READY)] == [first]
    (leaving,) = plane.cluster.of(SMALL, ReplicaPhase.DRAINING)
    assert (leaving.id, leaving.reason) == (second, "XID 79 on GPU 3")
    # The budget had no room: its successor starts when it is stopped, and no third replica starts.
    assert plane.counts() == {SMALL: 2}
    plane.cluster.drained()
    await seconds(plane, 5)
    plane.cluster.ready()
    await seconds(plane, 5)
    assert plane.counts() == plane.counts(READY) == {SMALL: 2}


async def test_min_healthy_keeps_a_slow_replica_without_room(plane: Plane) -> None:
    first, _ = await up(plane, gpus=2, min_healthy=2)
    plane.gpu_reports[first] = SLOW
    await seconds(plane, 90)
    assert plane.counts(READY) == {SMALL: 2}
    assert "kept: too few other replicas serve" in note(plane)


async def test_a_restarted_controller_receives_earlier_gpu_errors(plane: Plane) -> None:
    first, second = await up(plane, gpus=2)
    plane.gpu_reports[second] = FAILED
    await seconds(plane, 1)
    await plane.restart()
    await seconds(plane, 5)
    assert [replica.id for replica in plane.cluster.of(SMALL, ReplicaPhase.DRAINING)] == [second]
    plane.cluster.drained()
    await seconds(plane, 5)
    plane.cluster.ready()
    await seconds(plane, 5)
    assert first in plane.cluster.replicas and plane.counts(READY) == {SMALL: 2}
