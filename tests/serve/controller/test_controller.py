"""Operator commands to the controller, as timelines over replicas in memory."""

from __future__ import annotations

from typing import Any

import pytest

from policy.errors import ConfigError, SwitchRefused, TargetError
from policy.scaling.reconcile_steps import LayerKey
from policy.types import ReplicaPhase
from policy.wire.heartbeat import Heartbeat, Timeouts
from tests.serve.plane import LARGE, NEW_SMALL, READY, SMALL, Plane
from tests.serve.sim_documents import document, sim_model


def gpus(**over: Any) -> dict[str, Any]:
    shapes = {"large": {"gpus": 2, "tensor_parallel": 2, "cpus": 1}, "small": {"gpus": 1, "cpus": 1}}
    modes = {
        "multi-replica": {"shape": "small", "replicas": {"min": 2, "max": 2}},
        "single-large": {"shape": "large", "replicas": 1},
    }
    model = sim_model(shapes=shapes, modes=modes)
    model["control"] = {**model["control"], "assumed_start_s": 30}
    return document(model, budget={"gpus": 2}, **over)


async def test_scaling_keeps_running_replicas(plane: Plane) -> None:
    await plane.ready(document())
    first = set(plane.cluster.replicas)
    assert plane.controller.scale("m", 3).target == 3
    await plane.ticks()
    assert plane.counts(READY) == {SMALL: 3}
    assert first < set(plane.cluster.replicas)
    plane.controller.scale("m", 1)
    await plane.ticks()
    assert set(plane.cluster.replicas) == first


async def test_invalid_requests_change_nothing(plane: Plane) -> None:
    await plane.ready(document())
    with pytest.raises(TargetError, match=r"5 replicas in mode multi-replica, expected 1 to 4"):
        plane.controller.scale("m", 5)
    with pytest.raises(TargetError, match="no model is called 'x'; this deployment has m"):
        plane.controller.scale("x", 1)
    with pytest.raises(TargetError, match="mode 'huge', expected one of multi-replica, single-large"):
        plane.controller.mode("m", "huge")
    with pytest.raises(ConfigError, match=r"gateway\.workers"):
        plane.controller.apply(document(gateway={"workers": 0}))
    await plane.ticks()
    assert plane.counts() == {SMALL: 1}


async def test_changed_limits_restart_nothing(plane: Plane) -> None:
    await plane.up(document())
    plane.controller.scale("m", 4)
    await plane.ticks()
    running = dict(plane.cluster.replicas)
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 3}}}
    plane.controller.apply(document(sim_model(modes=modes)))
    await plane.ticks()
    assert plane.counts(READY) == {SMALL: 3}
    assert plane.cluster.replicas.items() <= running.items()


async def test_removed_mode_falls_back_to_the_first(plane: Plane) -> None:
    await plane.ready(document())
    plane.controller.apply(document(sim_model(modes={"single-large": {"shape": "large", "replicas": 1}})))
    await plane.ticks()
    assert plane.counts() == {LARGE: 1}
    # No mode uses it any more.
    assert set(plane.cluster.held) == {LARGE}


async def test_changed_shape_is_a_new_generation(plane: Plane) -> None:
    await plane.ready(document())
    plane.cluster.slow = True
    plane.controller.apply(document(sim_model(modes={"single-large": {"shape": "large", "replicas": 1}})))
    await plane.ticks()
    plane.cluster.ready()
    await plane.ticks()
    # The first model of that name still drains.
    assert plane.counts(ReplicaPhase.DRAINING) == {SMALL: 1}
    plane.cluster.slow = False
    shapes = {"large": {"cpus": 2}, "small": {"cpus": 1, "max_in_flight": 3}}
    model = sim_model(shapes=shapes)
    model["mode"] = "multi-replica"
    plane.controller.apply(document(model))
    plane.controller.mode("m", "multi-replica")
    await plane.ticks()
    assert plane.counts(READY) == {NEW_SMALL: 1}


async def test_replicas_of_a_removed_model_drain(plane: Plane) -> None:
    await plane.ready(document(sim_model(), sim_model("other")))
    plane.cluster.slow = True
    plane.controller.apply(document(sim_model("other")))
    await plane.ticks()
    assert plane.counts(ReplicaPhase.DRAINING) == {SMALL: 1}
    with pytest.raises(TargetError, match="m is no longer in the deployment"):
        plane.controller.scale("m", 2)
    plane.cluster.drained()
    await plane.ticks()
    assert [status.name for status in plane.controller.status().models] == ["other"]
    assert {key.model for key in plane.cluster.held} == {"other"}


async def test_gap_longer_than_the_queue_timeout_is_refused(plane: Plane) -> None:
    await plane.ready(gpus(gateway={"queue_timeout_s": 20}))
    with pytest.raises(SwitchRefused) as refused:
        plane.controller.mode("m", "single-large")
    assert str(refused.value) == (
        "m: single-large x 1, generation 1 needs resources that the running replicas hold, and its start"
        " takes about 30 s: gateway.queue_timeout_s = 20 s cannot hold the requests that arrive meanwhile"
    )
    await plane.ticks()
    assert plane.counts() == {SMALL: 2}


async def test_gap_within_the_queue_timeout_is_accepted(plane: Plane) -> None:
    await plane.ready(gpus())
    plane.controller.mode("m", "single-large")
    await plane.ticks()
    assert plane.counts() == {LARGE: 1}
    # The start time is measured now: a queue timeout of 20 s covers a start of 1 s.
    plane.controller.apply(gpus(gateway={"queue_timeout_s": 20}))
    plane.controller.mode("m", "multi-replica")
    await plane.ticks()
    assert plane.counts() == {SMALL: 2}


def pairs(budget: int, seed: int = 0) -> dict[str, Any]:
    """Two replicas of two GPUs each, both of which should serve."""
    model = sim_model(
        sim={"profile": "sim-small", "seed": seed},
        shapes={"small": {"gpus": 2, "tensor_parallel": 2}},
        modes={"multi-replica": {"shape": "small", "replicas": 2}},
    )
    model["control"] = {**model["control"], "assumed_start_s": 1, "scale": {"min_healthy": 2}}
    return document(model, budget={"gpus": budget})


async def test_replicas_that_stay_during_a_gap_go_on_serving(plane: Plane) -> None:
    """Too few are ready in either case; half of them are better than none."""
    await plane.ready(pairs(4))
    plane.cluster.slow = True
    plane.controller.apply(pairs(4, seed=7))
    seen: list[tuple[int, int]] = []
    while plane.counts() != {NEW_SMALL: 2}:
        await plane.ticks(3)
        (model,) = plane.controller.fleet().models
        assert model.closes_s is None
        ready = plane.counts(READY)
        seen.append((ready.get(SMALL, 0), ready.get(NEW_SMALL, 0)))
        plane.cluster.drained()
        plane.cluster.ready()
    assert list(dict.fromkeys(seen)) == [(1, 0), (0, 1)]


async def test_replicas_serve_on_if_room_comes_free_before_a_gap(plane: Plane) -> None:
    def written(budget: int, seed: int) -> dict[str, Any]:
        found = pairs(budget, seed)
        found["models"][0]["modes"]["multi-replica"]["replicas"] = 1
        return found

    await plane.ready(written(2, 0))
    plane.cluster.slow = True
    plane.controller.apply(written(2, 7))
    assert plane.target().ends_at is not None
    plane.controller.apply(written(4, 7))
    await plane.ticks(3)
    (model,) = plane.controller.fleet().models
    assert (plane.counts(READY), model.closes_s) == ({SMALL: 1}, None)
    plane.cluster.ready()
    await plane.ticks(3)
    plane.cluster.drained()
    assert plane.counts() == {NEW_SMALL: 1}


async def test_generation_with_too_long_a_gap_is_refused(plane: Plane) -> None:
    await plane.ready(gpus() | {"gateway": {"queue_timeout_s": 0.5}})
    changed = gpus(gateway={"queue_timeout_s": 0.5})
    changed["models"][0]["mode"] = "single-large"
    changed["models"][0]["modes"].pop("multi-replica")
    with pytest.raises(SwitchRefused):
        plane.controller.apply(changed)
    written = plane.state.load(plane.state.deployment_path, dict[str, Any])
    assert written is not None
    assert "multi-replica" in written["models"][0]["modes"]


async def test_new_timeouts_reach_running_replicas_without_a_new_generation(plane: Plane) -> None:
    await plane.ready(document())
    control = {"mode": {"drain_timeout_s": 77}, "progress_timeout_s": 7, "start_timeout_s": 60}
    plane.controller.apply(document(sim_model(control=control)))
    await plane.ticks()
    (replica,) = plane.cluster.replicas.values()
    assert LayerKey.of(replica) == SMALL
    timeouts = plane.controller.beat(Heartbeat(replica=replica)).timeouts
    assert timeouts == Timeouts(drain_timeout_s=77, progress_timeout_s=7, start_timeout_s=60)
