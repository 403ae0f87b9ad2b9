"""Modes whose shapes share GPUs: switches, failures, replacement, and zero replicas."""

from __future__ import annotations

from typing import Any

import pytest

from policy.errors import SwitchRefused
from policy.scaling.reconcile_steps import CLOSED_SHARE, LayerKey
from policy.types import Replica, ReplicaPhase
from policy.wire.controller_reports import GatewayReport, GpuReport, ModelReport
from policy.wire.heartbeat import GpuCommand, Heartbeat
from tests.serve.memory_actuator import MemoryCluster
from tests.serve.plane import LARGE, NEW_SMALL, READY, SMALL, Plane
from tests.serve.sim_documents import document, sim_model

ASLEEP, DRAINING, STARTING = ReplicaPhase.ASLEEP, ReplicaPhase.DRAINING, ReplicaPhase.STARTING
NEW_LARGE = LayerKey("m", "large", 2)
GPUS = 4
START_S, WAKE_S = 1.0, 0.5  # of an engine in memory
DRAIN_S = 10
CONTROL: dict[str, Any] = {"policy": "static", "mode": {"drain_timeout_s": DRAIN_S}, "start_timeout_s": 60}


def written(gpus: int | None = GPUS, **over: Any) -> dict[str, Any]:
    model: dict[str, Any] = {
        "sim": {"profile": "sim-small", "wake_s": 1.0},
        "shapes": {"large": {"gpus": GPUS, "tensor_parallel": GPUS}, "small": {"gpus": 1}},
        "modes": {
            "single-large": {"shape": "large", "replicas": 1},
            "multi-replica": {"shape": "small", "replicas": {"min": 2, "max": 4}},
        },
        "control": CONTROL,
    }
    return document(sim_model(**model | over), budget={"gpus": gpus})


async def up(plane: Plane, gpus: int | None = GPUS, **over: Any) -> set[str]:
    await plane.ready(written(gpus, **over))
    assert plane.counts(READY) == {LARGE: 1}
    assert plane.counts(ASLEEP) == {SMALL: 4}
    return set(plane.cluster.replicas)


def awake(cluster: MemoryCluster) -> set[str]:
    return {r.shape for r in cluster.replicas.values() if r.state in (READY, DRAINING)}


# Independent of free or unknown capacity elsewhere.
@pytest.mark.parametrize("gpus", [GPUS, 4 * GPUS, None])
async def test_a_switch_in_a_group_starts_nothing(plane: Plane, gpus: int | None) -> None:
    engines = await up(plane, gpus)
    assert {key: held.wanted for key, held in plane.cluster.held.items()} == {LARGE: 1}
    plane.controller.mode("m", "multi-replica")
    await plane.ticks()
    assert plane.counts(READY) == {SMALL: 2}
    assert plane.counts(ASLEEP) == {SMALL: 2, LARGE: 1}
    plane.controller.scale("m", 4)
    await plane.ticks()
    assert plane.counts(READY) == {SMALL: 4}
    plane.controller.mode("m", "single-large")
    await plane.ticks()
    assert plane.counts(READY) == {LARGE: 1}
    assert plane.phase() == "steady"
    assert plane.note() == ""
    assert set(plane.cluster.replicas) == engines
    assert {key: held.wanted for key, held in plane.cluster.held.items()} == {LARGE: 1}


async def test_the_lead_time_of_a_switch_is_a_wake(plane: Plane) -> None:
    # A start would take longer than requests may wait, and so would not be made.
    await plane.ready(written() | {"gateway": {"queue_timeout_s": 5}})
    plane.controller.mode("m", "multi-replica")
    await plane.ticks()
    assert plane.counts(READY) == {SMALL: 2}
    observed = plane.controller._observed
    assert observed.start_s(LARGE, 60.0) == observed.lead_s(LARGE, 60.0) == WAKE_S
    plane.controller.mode("m", "multi-replica")
    await plane.ticks()
    (now,) = plane.controller.autoscaler.journal.read(1)
    options = now.situation.mode_options
    assert {option.mode: (option.lead_s, option.gap_s) for option in options}["single-large"] == (
        WAKE_S,
        WAKE_S,
    )
    # Of another generation there is no engine to wake; it starts as that of this one did.
    assert observed.start_s(NEW_LARGE, 60.0) == START_S


async def test_a_shape_that_cannot_be_woken_is_rolled_back(plane: Plane) -> None:
    engines = await up(plane)
    plane.cluster.failing[SMALL] = "no memory left"
    plane.controller.mode("m", "multi-replica")
    await plane.ticks()
    assert plane.counts(READY) == {LARGE: 1}
    assert plane.counts(ASLEEP) == {SMALL: 4}
    assert "no memory left" in plane.note()
    assert set(plane.cluster.replicas) == engines
    plane.cluster.failing.clear()
    plane.controller.mode("m", "multi-replica")
    await plane.ticks()
    assert plane.counts(READY) == {SMALL: 2}


@pytest.mark.parametrize("gpus", [GPUS, 2 * GPUS])
async def test_a_new_revision_has_its_own_group(plane: Plane, gpus: int) -> None:
    old = await up(plane, gpus)
    new = written(gpus, sim={"profile": "sim-small", "wake_s": 1.0, "seed": 7})
    plane.controller.apply(new)
    fewest = 1
    for _ in range(20):
        await plane.ticks(1)
        fewest = min(fewest, sum(plane.counts(READY).values()))
    assert plane.counts(READY) == {NEW_LARGE: 1}
    assert plane.counts(ASLEEP) == {NEW_SMALL: 4}
    assert not old & set(plane.cluster.replicas)
    assert set(plane.cluster.held) == {NEW_LARGE}
    # With room for both no request waits; without it the old group frees its GPUs.
    assert fewest == (1 if gpus > GPUS else 0)


@pytest.mark.parametrize(("gpus", "counts"), [(GPUS, {4, 0}), (2 * GPUS, {4})])
async def test_a_new_revision_gives_up_all_small_replicas_or_none(
    plane: Plane, gpus: int, counts: set[int]
) -> None:
    await up(plane, gpus)
    plane.controller.mode("m", "multi-replica")
    plane.controller.scale("m", 4)
    await plane.ticks()
    assert plane.counts(READY) == {SMALL: 4}
    plane.controller.apply(written(gpus, sim={"profile": "sim-small", "wake_s": 1.0, "seed": 7}))
    serving = set()
    for _ in range(20):
        await plane.ticks(1)
        serving.add(sum(plane.counts(READY).values()))
        serving.discard(8)
    assert serving == counts
    assert plane.counts(READY) == {NEW_SMALL: 4}


async def test_the_start_of_a_group_is_that_of_all_its_shapes(plane: Plane) -> None:
    await up(plane)
    plane.cluster.slow = True
    new = written(sim={"profile": "sim-small", "wake_s": 1.0, "seed": 7})
    # An engine takes 1 s, and both shapes start in turn.
    with pytest.raises(SwitchRefused, match="about 2 s"):
        plane.controller.apply(new | {"gateway": {"queue_timeout_s": 1.5}})
    plane.controller.apply(new | {"gateway": {"queue_timeout_s": 2}})


# A controller that is restarted meanwhile goes on with what it saved.
@pytest.mark.parametrize("restart", ["", "in the drain", "at its end", "in the start"])
async def test_a_long_drain_does_not_count_against_the_start(plane: Plane, restart: str) -> None:
    await up(plane)
    plane.cluster.slow = True
    plane.controller.mode("m", "multi-replica")
    for _ in range(20):
        plane.now += 10.0
        await plane.ticks(1)
    assert plane.counts(DRAINING) == {LARGE: 1}
    assert (plane.phase(), plane.note()) == ("giving way", "")
    if restart == "in the drain":
        await plane.restart()
        await plane.ticks()
    plane.cluster.drained()
    if restart == "at its end":
        await plane.restart()
    await plane.ticks()
    assert plane.counts(STARTING) == {SMALL: 2}
    if restart == "in the start":
        await plane.restart()
        await plane.ticks()
    # From here on, the start has its time.
    plane.now += CONTROL["start_timeout_s"] - 10.0
    await plane.ticks(1)
    assert plane.note() == ""
    plane.now += 20.0
    await plane.ticks(1)
    assert plane.note().startswith("rolled back from multi-replica")


async def test_a_switch_drains_for_its_drain_timeout_once(plane: Plane) -> None:
    """Replicas take what ends before a long stream, and then have only the rest of the timeout."""
    await up(plane)
    plane.cluster.slow = True
    stream = ModelReport(arrived=1, drain_s=1000.0)
    plane.controller.signals(GatewayReport(worker="w", number=1, since_s=1.0, models={"m": stream}))
    plane.controller.mode("m", "multi-replica")
    began = plane.now
    left_s = []
    while not plane.counts(DRAINING):
        await plane.ticks(1)
        (large,) = plane.cluster.of(LARGE, READY, DRAINING)
        timeouts = plane.controller.beat(Heartbeat(replica=large)).timeouts
        if large.state is READY:
            assert timeouts is not None
            left_s.append(plane.now - began + timeouts.drain_timeout_s)
        else:
            # It has what it was told when it began to drain.
            assert timeouts is None
    assert plane.now - began == pytest.approx((1 - CLOSED_SHARE) * DRAIN_S, abs=0.5)
    assert left_s == pytest.approx([DRAIN_S] * len(left_s))
    (small, *_) = plane.cluster.of(SMALL, ASLEEP)
    timeouts = plane.controller.beat(Heartbeat(replica=small)).timeouts
    assert timeouts is not None and timeouts.drain_timeout_s == DRAIN_S


async def test_a_failed_new_revision_gives_the_gpus_back(plane: Plane) -> None:
    await up(plane)
    plane.cluster.failing[NEW_LARGE] = "no such weights"
    plane.controller.apply(written(sim={"profile": "sim-small", "wake_s": 1.0, "seed": 7}))
    await plane.ticks(30)
    assert plane.counts(READY) == {LARGE: 1}
    assert set(plane.cluster.held) == {LARGE}
    assert "no such weights" in plane.note()


async def test_no_engine_starts_or_stops_with_sleep_never(plane: Plane) -> None:
    await up(plane)
    never = {"policy": "static", "mode": {"drain_timeout_s": 10, "sleep": "never"}, "start_timeout_s": 60}
    plane.controller.apply(written(control=never))
    await plane.ticks(20)
    assert plane.counts() == {NEW_LARGE: 1}
    plane.controller.mode("m", "multi-replica")
    await plane.ticks(20)
    assert plane.counts() == {NEW_SMALL: 2}
    plane.controller.apply(written())
    await plane.ticks(20)
    assert plane.counts(READY) == {LayerKey("m", "small", 3): 2}
    assert plane.counts(ASLEEP) == {LayerKey("m", "large", 3): 1, LayerKey("m", "small", 3): 2}


async def test_at_zero_replicas_all_engines_sleep_and_the_group_keeps_its_gpus(plane: Plane) -> None:
    modes = {
        "multi-replica": {"shape": "small", "replicas": {"min": 0, "max": 4}},
        "single-large": {"shape": "large", "replicas": 1},
    }
    both = written(2 * GPUS, modes=modes)
    other = sim_model(
        "o",
        shapes={"small": {"gpus": 1}},
        modes={"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 8}}},
    )
    both["models"].append(other)
    await plane.ready(both)
    engines = {r.id for r in plane.cluster.replicas.values() if r.model == "m"}
    plane.controller.scale("m", 0)
    plane.controller.scale("o", 8)
    await plane.ticks()
    assert plane.counts(ASLEEP) == {LARGE: 1, SMALL: 4}
    # The group has four of eight GPUs.
    assert plane.counts(READY) == {LayerKey("o", "small", 1): 4}
    plane.controller.scale("o", 4)
    plane.controller.scale("m", 3)
    await plane.ticks()
    assert plane.counts(READY)[SMALL] == 3
    assert {r.id for r in plane.cluster.replicas.values() if r.model == "m"} == engines


async def test_a_removed_model_removes_its_group(plane: Plane) -> None:
    await up(plane)
    plane.controller.apply(document(sim_model("other")))
    await plane.ticks(20)
    assert {replica.model for replica in plane.cluster.replicas.values()} == {"other"}
    assert plane.state.load(plane.state.gpu_groups_path, list[Any]) == []
    assert [status.name for status in plane.controller.status().models] == ["other"]


async def test_an_engine_on_a_failed_gpu_sleeps_while_another_serves(plane: Plane) -> None:
    await up(plane)
    plane.controller.mode("m", "multi-replica")
    await plane.ticks()
    first, second = plane.cluster.of(SMALL, READY)
    plane.gpu_reports[first.id] = GpuReport(watts=0.0, xid=79, card="GPU 0")
    await plane.ticks()
    serving = {replica.id for replica in plane.cluster.of(SMALL, READY)}
    assert len(serving) == 2 and second.id in serving and first.id not in serving


@pytest.mark.parametrize("name", ["gpu-groups.json", "beds.json"])
async def test_a_record_without_its_group_is_dropped(plane: Plane, name: str) -> None:
    """A `down` of an earlier version left it, and the model has no shared group any more."""
    await up(plane)
    plane.state.gpu_groups_path.rename(plane.state.root / name)
    plane.state.targets_path.unlink()
    for there in (plane.cluster.held, plane.cluster.replicas, plane.cluster.groups):
        there.clear()
    plane.state.save(plane.state.deployment_path, document())
    await plane.restart()
    await plane.ticks()
    assert (plane.counts(READY), plane.note()) == ({SMALL: 1}, "")


async def test_orders_go_to_every_engine_of_the_group_only(plane: Plane) -> None:
    await up(plane)
    for replica in list(plane.cluster.replicas.values()):
        orders = plane.controller.beat(Heartbeat(replica=replica))
        assert orders.gpus is (GpuCommand.SERVE if replica.shape == "large" else GpuCommand.SLEEP)
    other_replica = Replica(
        id="x",
        model="m",
        shape="large",
        generation=7,
        state=STARTING,
        load=next(iter(plane.cluster.replicas.values())).load,
    )
    assert plane.controller.beat(Heartbeat(replica=other_replica)).gpus is None
