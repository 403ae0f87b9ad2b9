"""Recovery of the controller: failed starts, restarts, and lost state."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from policy.errors import ActuatorFailed
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator.interface import ActuatorLayer
from serve.autoscaler import autoscaler
from serve.autoscaler.decision_inputs import SituationBuilder
from serve.controller import controller
from serve.controller.controller import LISTEN_S
from serve.state.replica_registry import UNHEARD_S
from tests.serve.memory_actuator import MemoryActuator
from tests.serve.plane import LARGE, NEW_SMALL, READY, SMALL, Plane
from tests.serve.sim_documents import document, sim_model


async def test_failed_start_is_rolled_back(plane: Plane) -> None:
    await plane.ready(document())
    running = set(plane.cluster.replicas)
    plane.cluster.failing[NEW_SMALL] = "ValueError: no such weights"
    bad = document(sim_model(sim={"profile": "sim-small", "seed": 7}))
    plane.controller.apply(bad)
    await plane.ticks()
    assert set(plane.cluster.replicas) == running
    assert set(plane.cluster.held) == {SMALL}
    assert plane.note() == "rolled back from multi-replica x 1, generation 2: ValueError: no such weights"

    # Neither a restart nor another count tries it again; applying it does.
    plane.controller.scale("m", 2)
    await plane.restart()
    await plane.ticks()
    assert plane.counts() == {SMALL: 2}
    plane.cluster.failing.clear()
    plane.controller.apply(bad)
    await plane.ticks()
    assert plane.counts() == {NEW_SMALL: 2}
    assert plane.note() == ""


@pytest.mark.parametrize("failed", [True, False])
async def test_a_reverted_apply_keeps_the_running_replicas(plane: Plane, failed: bool) -> None:
    """Whether what was applied has failed or still starts."""
    await plane.ready(document())
    running = set(plane.cluster.replicas)
    if failed:
        plane.cluster.failing[NEW_SMALL] = "ValueError: no such weights"
    plane.cluster.slow = not failed
    plane.controller.apply(document(sim_model(sim={"profile": "sim-small", "seed": 7})))
    await plane.ticks()
    assert plane.note().startswith("rolled back") is failed
    plane.cluster.slow = False
    plane.controller.apply(document())
    await plane.ticks()
    assert plane.note() == ""
    assert set(plane.cluster.replicas) == running


async def test_restart_continues_a_switch(plane: Plane) -> None:
    await plane.ready(document())
    plane.cluster.slow = True
    plane.controller.mode("m", "single-large")
    await plane.ticks(2)
    # Longer than the start timeout, which does not apply before the first heartbeats.
    plane.now += 600
    plane.cluster.ready()
    epoch = plane.controller.fleet().epoch
    await plane.restart()
    await plane.controller.tick()
    assert plane.counts(READY) == {SMALL: 1, LARGE: 1}
    assert plane.controller.fleet().epoch > epoch
    await plane.ticks()
    plane.cluster.drained()
    await plane.ticks()
    assert plane.counts(READY) == {LARGE: 1}
    assert plane.note() == ""


async def test_a_clock_that_was_set_back_delays_no_rollback(plane: Plane) -> None:
    await plane.ready(document(sim_model(control={"start_timeout_s": 60})))
    plane.cluster.slow = True
    plane.controller.apply(
        document(sim_model(control={"start_timeout_s": 60}, sim={"profile": "sim-small", "seed": 7}))
    )
    await plane.ticks(2)
    plane.ahead -= 7200.0
    await plane.restart()
    await plane.ticks(2)
    assert plane.note() == ""
    plane.now += 60.0
    await plane.ticks(2)
    assert plane.note().startswith("rolled back from multi-replica x 1, generation 2")


async def test_a_restarted_controller_waits_a_bounded_time_for_heartbeats(plane: Plane) -> None:
    await plane.ready(document())
    plane.cluster.replicas.clear()
    await plane.restart()
    plane.controller.scale("m", 2)
    await plane.controller.tick()
    assert plane.cluster.held[SMALL].wanted == 1
    plane.now += LISTEN_S
    await plane.controller.tick()
    assert plane.cluster.held[SMALL].wanted == 2


async def test_refused_orders_are_not_part_of_the_measured_start_time(plane: Plane) -> None:
    await plane.ready(document())
    plane.cluster.slow, plane.cluster.refuses = True, "no space left on device"
    plane.controller.scale("m", 2)
    await plane.ticks(50)
    assert plane.counts(READY) == {SMALL: 1}
    plane.cluster.refuses = ""
    for _ in range(3):
        plane.controller.scale("m", 2)
        await plane.ticks(2)
        plane.now += 2.0
        plane.cluster.ready()
        assert plane.counts(READY) == {SMALL: 2}
        plane.controller.scale("m", 1)
        await plane.ticks(2)
        plane.cluster.drained()
        plane.now += 600.0
    (measured,) = plane.controller.autoscaler.observed.starts.saved()
    assert max(measured.seconds) < 3.0


FAULT = AssertionError("no")


@pytest.mark.parametrize("error", [ActuatorFailed("no"), FAULT], ids=["foreseen", "fault"])
@pytest.mark.parametrize(
    ("owner", "method", "fails", "part"),
    [
        (MemoryActuator, "deploy", lambda _, key, *__: key.model == "m", "control step"),
        (SituationBuilder, "situation", lambda _, name, *__: name == "m", "observation"),
        (SituationBuilder, "note", lambda _, beat: beat.replica.model == "m", "heartbeat"),
        (autoscaler, "decide_all", lambda situations, *_: "m" in situations, "decision"),
    ],
)
async def test_a_failure_of_one_model_stops_no_other(  # noqa: PLR0917 - a table
    plane: Plane,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    owner: object,
    method: str,
    fails: Callable[..., bool],
    part: str,
) -> None:
    original = getattr(owner, method)

    def fail(*given: Any) -> Any:
        if fails(*given):
            raise error
        return original(*given)

    async def decide() -> None:
        for name in ("m", "other"):
            plane.controller.autoscaler.decide_soon(name, urgent=True)
        await plane.ticks()

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail)
        await plane.ready(document(sim_model(), sim_model("other")))
        await decide()
        assert plane.counts(READY)[LayerKey("other", "small", 1)] == 1
        failed, other = plane.controller.status().models
        assert f"{part} failed: {'' if error is not FAULT else 'AssertionError: '}no" in failed.note
        assert "test_control_recovery.py" in failed.note or error is not FAULT
        assert other.note == ""
        assert plane.controller.fleet().models[0].note == failed.note
        assert "other" in plane.controller.autoscaler.latest
    await decide()
    assert plane.counts(READY) == {SMALL: 1, LayerKey("other", "small", 1): 1}
    assert plane.note() == ""


def around_delete(
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Run a callback around each deletion of a layer by the actuator."""
    delete = MemoryActuator.delete

    async def patched(self: MemoryActuator, key: LayerKey) -> None:
        before()
        await delete(self, key)
        after()

    monkeypatch.setattr(MemoryActuator, "delete", patched)


async def test_target_set_during_a_delete_is_kept(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    around_delete(monkeypatch, before=lambda: plane.controller.scale("m", 3))
    await plane.ready(document())
    plane.controller.apply(document(sim_model(sim={"profile": "sim-small", "seed": 7})))
    await plane.ticks()
    assert plane.counts() == {NEW_SMALL: 3}


async def test_model_applied_again_during_its_delete(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    both = document(sim_model(), sim_model("other"))
    await plane.ready(both)
    around_delete(monkeypatch, after=lambda: plane.controller.apply(both))
    plane.controller.apply(document(sim_model("other")))
    await plane.ticks()
    assert plane.counts(READY) == {SMALL: 1, LayerKey("other", "small", 1): 1}


DOWN, FULL = ActuatorFailed("Serve's API does not answer"), OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize(
    "failures", [(DOWN, DOWN), (None, FULL), (None, FAULT)], ids=["cluster", "disk", "fault"]
)
async def test_the_control_loop_continues_after_errors(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, failures: tuple[Exception | None, ...]
) -> None:
    monkeypatch.setattr(controller, "RETRY_S", 0.0)
    await plane.up(document())
    layers, errors = MemoryActuator.layers, iter(failures)

    async def fail_at_first(self: MemoryActuator) -> Mapping[LayerKey, ActuatorLayer]:
        if (error := next(errors, None)) is not None:
            raise error
        return await layers(self)

    monkeypatch.setattr(MemoryActuator, "layers", fail_at_first)
    running = asyncio.ensure_future(plane.controller.run())
    while not plane.counts(READY):  # noqa: ASYNC110 - the test's own timeout bounds it
        await asyncio.sleep(0.001)
    assert any(str(failures[-1]) in event for event in plane.controller.status().events)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_a_host_that_hung_before_a_restart_is_found(plane: Plane) -> None:
    await plane.ready(document())
    (silent,) = plane.cluster.replicas
    plane.cluster.held[SMALL] = msgspec.structs.replace(plane.cluster.held[SMALL], hosts=(silent,))
    await plane.restart()
    await plane.controller.tick()
    plane.now += UNHEARD_S + 1
    (hung,) = plane.controller.registry.take_hung(plane.monotonic())
    assert (hung.id, LayerKey.of(hung)) == (silent, SMALL)
