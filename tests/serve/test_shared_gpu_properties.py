"""A shared GPU group converges after any sequence of events, and never uses its GPUs twice."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policy.types import ReplicaPhase
from store.state_dir import StateDir
from tests.serve.plane import READY, Plane
from tests.serve.test_shared_gpu_switches import GPUS, written

DRAINING = ReplicaPhase.DRAINING
COMMANDS = ("large", "small", "four", "apply", "revert")
EVENTS = ("kill", "forget", "broken", "mended", "drained", "ready", "tick")
OPS = st.sampled_from([*COMMANDS, *EVENTS])

pytestmark = pytest.mark.slow


@settings(max_examples=20, deadline=None)
@example(["small", "apply", "revert", "ready", "four", "apply"], 2 * GPUS)
@given(st.lists(OPS, max_size=30), st.sampled_from([GPUS, 2 * GPUS, None]))
def test_a_group_converges_after_any_sequence_of_events(ops: list[str], gpus: int | None) -> None:
    before = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_play(Path(folder), ops, gpus))
        # The journal writes beside its controllers, and may not be done when they are.
        for writer in set(threading.enumerate()) - before:
            writer.join()


async def _play(folder: Path, ops: list[str], gpus: int | None) -> None:
    plane = await Plane(StateDir(folder).ensure()).up(written(gpus))
    await plane.ticks()
    plane.cluster.slow = True
    for op in ops:
        await _do(plane, op, gpus)
        _check(plane)
    plane.cluster.failing.clear()
    # Longer than the back-off of failures and the start timeout.
    for _ in range(60):
        plane.now += 2.0
        await plane.ticks(1)
        _check(plane)
        plane.cluster.drained()
        plane.cluster.ready()
    status = plane.controller.status().models[0]
    shape = "large" if status.mode == "single-large" else "small"
    awake = {(key.shape, key.generation): count for key, count in plane.counts(READY).items()}
    assert awake == {(shape, status.generation): status.target}
    assert plane.phase() == "steady"
    # Only the group of that revision is left.
    assert {key.generation for key in plane.counts()} == {status.generation}


async def _do(plane: Plane, op: str, gpus: int | None) -> None:
    match op:
        case "large":
            plane.controller.mode("m", "single-large")
        case "small":
            plane.controller.mode("m", "multi-replica")
        case "four" if plane.controller.status().models[0].mode == "multi-replica":
            plane.controller.scale("m", 4)
        case "kill":
            await plane.restart()
            plane.cluster.beat_all()
        case "forget":
            plane.cluster.orders.clear()
        case "apply":
            plane.controller.apply(written(gpus, sim={"profile": "sim-small", "wake_s": 1.0, "seed": 7}))
        case "revert":
            plane.controller.apply(written(gpus))
        case "drained":
            plane.cluster.drained()
        case "ready":
            plane.cluster.ready()
        case "broken":
            plane.cluster.failing = {key: "no memory" for key in plane.counts() if key.shape == "small"}
        case "mended":
            plane.cluster.failing.clear()
    await plane.ticks(2)


def _check(plane: Plane) -> None:
    used = plane.counts(READY, DRAINING)
    for generation in {key.generation for key in used}:
        assert len({key.shape for key in used if key.generation == generation}) == 1, used
