"""Decisions are applied: timelines of load, signals and documents over replicas in memory."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.scaling.reconcile_steps import LayerKey
from policy.types import ReplicaPhase
from serve.autoscaler.autoscaler import AutoscalerState
from serve.autoscaler.decision_inputs import SituationBuilder
from serve.autoscaler.decision_journal import DecisionRound
from serve.controller_api_schema import LoggedDecision, ModelStatus
from store.state_dir import StateDir
from tests.gateway.worker import until
from tests.serve.plane import READY, SMALL, Plane
from tests.serve.sim_documents import document, sim_model
from tests.serve.traffic import Traffic, by_rate

ANY = {"max_step_up": 4, "max_step_down": 1, "hold_s": 10}
EMPTY = {"multi-replica": {"shape": "small", "replicas": {"min": 0, "max": 4}}}


def model(
    folder: Path, name: str = "m", *, control: dict[str, Any] | None = None, **over: Any
) -> dict[str, Any]:
    made = sim_model(name, **over)
    made["control"] |= {"tick_s": 1, "policy": by_rate(folder), "scale": ANY, **(control or {})}
    return made


def static(replicas: int) -> dict[str, Any]:
    return {"policy": {"static": {"replicas": replicas}}}


def status(plane: Plane) -> ModelStatus:
    return plane.controller.status().models[0]


def logged(plane: Plane, last: int = 1, model: str | None = None) -> list[LoggedDecision]:
    return plane.controller.autoscaler.journal.read(last, None, model)


@contextmanager
def full_disk(but: Path | None = None) -> Iterator[None]:
    save = StateDir.save

    def full(self: StateDir, path: Path, value: Any) -> None:
        if path != but:
            raise OSError(errno.ENOSPC, "no space left on device")
        save(self, path, value)

    with pytest.MonkeyPatch.context() as disk:
        disk.setattr(StateDir, "save", full)
        yield


@pytest.mark.slow
async def test_starting_replicas_count_as_supply(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 10, m=1.0)
    plane.cluster.slow = True
    await traffic.run(20, m=3.0)
    assert plane.counts() == {SMALL: 3}
    (now,) = logged(plane)
    assert now.situation.supply.serving == 1
    assert len(now.situation.supply.starting_s) == 2
    assert not now.decision.changes
    plane.cluster.ready()
    await traffic.run(2)
    assert logged(plane)[0].situation.supply.starting_s == ()


@pytest.mark.slow
async def test_replicas_are_kept_while_no_gateway_reports(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 15, m=3.0)
    traffic.silent = True
    await traffic.run(100, m=0.0)
    assert plane.counts(READY) == {SMALL: 3}
    traffic.silent = False
    await traffic.run(40, m=1.0)
    assert plane.counts(READY) == {SMALL: 1}


async def test_scale_to_zero_until_a_request_is_queued(plane: Plane, tmp_path: Path) -> None:
    to_zero = {"scale": {"zero_after_s": 30, "hold_s": 5, "standby": 1.0}, "tick_s": 20}
    traffic = await Traffic.over(plane, document(model(tmp_path, modes=EMPTY, control=to_zero)), 30, m=1.0)
    await traffic.run(90, m=0.0)
    assert plane.counts() == {}
    assert (plane.phase(), status(plane).target) == ("idle", 0)
    # A queued request is served before the next tick, which may be twenty seconds away.
    traffic.queued["m"] = 1
    traffic.report()
    await plane.ticks(2)
    assert plane.counts(READY) == {SMALL: 1}
    assert plane.phase() == "steady"


async def test_dry_run_logs_decisions_only(plane: Plane, tmp_path: Path) -> None:
    dry_run = {"guard": {"dry_run": True}}
    traffic = await Traffic.over(plane, document(model(tmp_path, control=dry_run)), 15, m=3.0)
    assert plane.counts() == {SMALL: 1}
    (now,) = logged(plane)
    assert (now.decision.count, now.decision.was_count, now.decision.dry_run) == (3, 1, True)
    assert status(plane).dry_run
    plane.controller.scale("m", 2)
    await traffic.run(2)
    assert plane.counts() == {SMALL: 2}
    plane.controller.scale("m", None)
    plane.controller.apply(document(model(tmp_path)))
    await plane.ticks(3)
    assert plane.counts(READY) == {SMALL: 3}


async def test_dry_run_does_not_scale_up_from_zero(plane: Plane, tmp_path: Path) -> None:
    to_zero = {"scale": {"zero_after_s": 30, "hold_s": 5}, "guard": {"dry_run": True}}
    traffic = await Traffic.over(plane, document(model(tmp_path, modes=EMPTY, control=to_zero)), 10, m=1.0)
    plane.controller.scale("m", 0)
    await traffic.run(5, m=0.0)
    plane.controller.scale("m", None)
    traffic.queued["m"] = 1
    await traffic.run(10)
    assert plane.counts() == {}
    plane.controller.scale("m", 1)
    await traffic.run(2)
    assert plane.counts(READY) == {SMALL: 1}


async def test_manual_count_respects_the_budget_in_a_dry_run(plane: Plane, tmp_path: Path) -> None:
    dry_run, watts = {"guard": {"dry_run": True}}, {"watts": 250, "cpu_watts": 100}
    deployed = document(model(tmp_path, control=dry_run), budget=watts)
    traffic = await Traffic.over(plane, deployed, 10, m=1.0)
    plane.controller.scale("m", 4)
    await traffic.run(3)
    assert plane.counts() == {SMALL: 2}


async def test_a_new_policy_decides_at_the_next_tick(plane: Plane, tmp_path: Path) -> None:
    rare = {"tick_s": 300, "shadow": "static"}
    traffic = await Traffic.over(plane, document(model(tmp_path, control=rare)), 12, m=1.0)
    first = set(plane.cluster.replicas)
    plane.controller.apply(document(model(tmp_path, control=rare | static(3))))
    await plane.ticks(2)
    assert plane.counts(READY) == {SMALL: 3}
    assert first < set(plane.cluster.replicas)
    assert status(plane).decided_by == "static"
    (now,) = logged(plane)
    assert now.decision.shadow is not None
    assert now.decision.shadow.reason == "1 as now"
    assert "static" not in now.decision.others
    # Ticks follow the new document as well.
    plane.controller.apply(document(model(tmp_path, control={"tick_s": 1})))
    at = plane.now
    await traffic.run(5)
    assert {each.decision.at for each in logged(plane, 9) if each.decision.at > at}


async def test_deployment_that_cannot_be_saved_is_not_applied(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 12, m=2.0)

    with full_disk(), pytest.raises(OSError, match="no space left"):
        plane.controller.apply(document(model(tmp_path, control=static(4))))
    await traffic.run(5)
    assert status(plane).decided_by == "by_rate.py:ByRate"
    assert plane.counts(READY) == {SMALL: 2}


async def test_full_disk_does_not_stop_scaling(plane: Plane, tmp_path: Path) -> None:
    both = document(model(tmp_path), model(tmp_path, "other"), budget={"cpus": 8})
    traffic = await Traffic.over(plane, both, 10, m=1.0, other=1.0)
    with full_disk():
        traffic.rates |= {"m": 3.0, "other": 2.0}
        await traffic.run(10)
        (event,) = (event for event in plane.controller.status().events if "cannot be saved" in event)
        assert "targets apply, but cannot be saved for a restart: " in event
        assert plane.counts(READY) == {SMALL: 3, LayerKey("other", "small", 1): 2}
    await traffic.run(1)
    await plane.restart()
    assert [status.target for status in plane.controller.status().models] == [3, 2]


async def test_saved_deployment_is_applied_whole_on_a_full_disk(plane: Plane, tmp_path: Path) -> None:
    first, other = model(tmp_path), model(tmp_path, "other")
    traffic = await Traffic.over(plane, document(first, other), 12, m=1.0, other=1.0)
    changed = {"sim": {"profile": "sim-small", "seed": 7}}
    with full_disk(but=plane.state.deployment_path):
        plane.controller.apply(document(first | changed, other | changed))
        await traffic.run(5)
    assert [status.generation for status in plane.controller.status().models] == [2, 2]
    await traffic.run(1)
    await plane.restart()
    assert [status.generation for status in plane.controller.status().models] == [2, 2]


@pytest.mark.slow
async def test_higher_priority_takes_replicas_from_lower(plane: Plane, tmp_path: Path) -> None:
    low, high = model(tmp_path, "low"), model(tmp_path, "high", priority=5)
    traffic = await Traffic.over(plane, document(low, high, budget={"cpus": 4}), 15, low=3.0, high=1.0)
    keys = LayerKey("low", "small", 1), LayerKey("high", "small", 1)
    assert [plane.counts(READY)[key] for key in keys] == [3, 1]
    await traffic.run(60, high=3.0)
    assert [plane.counts(READY)[key] for key in keys] == [1, 3]
    # Replicas of low priority go to high priority, and later to no model.
    counts = [each.decision.count for each in reversed(logged(plane, 400, model="low"))]
    top = counts.index(3) + 1
    assert counts == sorted(counts[:top]) + sorted(counts[top:], reverse=True)


@pytest.mark.slow
async def test_the_budget_is_kept_with_different_tick_periods(plane: Plane, tmp_path: Path) -> None:
    low = model(tmp_path, "low", control={"tick_s": 7})
    high = model(tmp_path, "high", priority=5, control={"tick_s": 3})
    traffic = await Traffic.over(plane, document(low, high, budget={"cpus": 4}), 20, low=3.0, high=1.0)
    most = 0
    for _ in range(60):
        await traffic.run(1, high=3.0)
        most = max(most, sum(plane.counts().values()))
    assert plane.counts(READY) == {LayerKey("low", "small", 1): 1, LayerKey("high", "small", 1): 3}
    assert most == 4


async def test_the_memory_of_a_policy_survives_a_restart(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 12, m=2.0)
    seen = remembered(plane)
    assert seen > 5
    await plane.restart()
    await traffic.run(9)
    assert remembered(plane) > seen
    assert plane.counts(READY) == {SMALL: 2}
    # The memory of one policy is not passed to another.
    plane.controller.apply(document(model(tmp_path, control={"policy": by_rate(tmp_path, each=2.0)})))
    await traffic.run(2)
    assert remembered(plane) < seen


@pytest.mark.parametrize("damage", ["text", "disk"])
async def test_an_unreadable_policy_memory_starts_empty(plane: Plane, tmp_path: Path, damage: str) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 12, m=2.0)
    memory = plane.state.memory_path
    if damage == "text":
        memory.write_text('{"memories": {"m": 3')
    else:
        # It cannot be saved either, and decisions continue.
        memory.unlink()
        memory.mkdir()
    await plane.restart()
    await traffic.run(8, m=3.0)
    assert damage == "disk" or 0 < remembered(plane) < 6
    await traffic.run(12)
    assert plane.counts(READY) == {SMALL: 3}


async def test_failing_starts_are_reported_and_not_repeated(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 12, m=1.0)
    plane.cluster.failing[SMALL] = "out of memory"
    await traffic.run(10, m=2.0)
    assert plane.counts(READY) == {SMALL: 1}
    plane.cluster.held[SMALL] = msgspec.structs.replace(plane.cluster.held[SMALL], retry_at=plane.now + 8.4)
    await plane.ticks(1)
    assert plane.note() == "out of memory; tried again in 8 s"
    await traffic.run(20, m=4.0)
    assert status(plane).target == 2
    assert "starts in a row failed" in status(plane).reason


async def test_rollback_note_stays_while_counts_change(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 12, m=1.0)
    plane.cluster.failing[LayerKey("m", "small", 2)] = "no such argument"
    plane.controller.apply(document(model(tmp_path, sim={"profile": "sim-small", "seed": 7})))
    await traffic.run(15, m=4.0)
    assert plane.counts(READY) == {SMALL: 4}
    assert plane.phase() == "steady"
    assert plane.note().startswith("rolled back from multi-replica")
    assert plane.note().endswith("generation 2: no such argument")


@pytest.mark.slow
async def test_count_changes_do_not_extend_the_start_timeout(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 12, m=1.0)
    plane.cluster.slow = True
    plane.controller.apply(document(model(tmp_path, sim={"profile": "sim-small", "seed": 7})))
    rolled_back_s = None
    for second in range(80):
        await traffic.run(1, m=2.0 + second // 15 % 3)
        if rolled_back_s is None and plane.note().startswith("rolled back"):
            rolled_back_s = second
    assert rolled_back_s is not None
    assert 58 <= rolled_back_s <= 62


async def test_lost_replica_is_replaced_at_once(plane: Plane, tmp_path: Path) -> None:
    await Traffic.over(plane, document(model(tmp_path, control={"tick_s": 300})), 10, m=1.0)
    (replica,) = plane.cluster.replicas.values()
    before = logged(plane)[0].decision.at
    plane.cluster.become(replica, ReplicaPhase.STOPPED)
    await plane.ticks(1)
    assert logged(plane)[0].decision.at > before


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setattr("serve.autoscaler.custom_policy.PATIENCE_S", 0.3)
    monkeypatch.setattr(Slow, "answers", threading.Event())
    yield {"policy": {"custom": "tests.serve.autoscaler.test_autoscaler:Slow"}}
    Slow.answers.set()


@pytest.mark.slow
async def test_a_hanging_policy_delays_no_other(
    plane: Plane, tmp_path: Path, hanging: dict[str, Any]
) -> None:
    other = model(tmp_path, "other", control=static(2))
    # All that share a budget are decided on together.
    both = document(model(tmp_path, control=hanging), other, budget={"cpus": 8})
    traffic = await Traffic.over(plane, both, 10, m=1.0, other=1.0)
    assert plane.counts(READY) == {SMALL: 1, LayerKey("other", "small", 1): 2}
    events = [event for event in plane.controller.status().events if "no answer" in event]
    assert len(events) == 1
    plane.controller.apply(document(model(tmp_path, control=static(3)), other))
    await traffic.run(2)
    assert plane.counts(READY)[SMALL] == 3


async def test_a_decision_made_for_replaced_bounds_is_not_applied(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: dict[str, Any]
) -> None:
    monkeypatch.setattr("serve.autoscaler.custom_policy.PATIENCE_S", 60.0)
    await plane.up(document(model(tmp_path, control=hanging)))
    scaler = plane.controller.autoscaler
    scaler.patience_s = 0.02
    await Traffic(plane).run(6, m=1.0)
    assert scaler.latest == {}
    assert len([event for event in plane.controller.status().events if "has not answered" in event]) == 1
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 2}}}
    plane.controller.apply(document(model(tmp_path, modes=modes, control=hanging)))
    Slow.answers.set()
    await until(lambda: "m" in scaler.latest, "the round has ended")
    assert status(plane).target == 1
    scaler.patience_s = 60.0
    await plane.ticks(1)
    assert status(plane).target == 2


async def test_a_measured_start_time_replaces_the_assumed_one(plane: Plane, tmp_path: Path) -> None:
    assumed = {"assumed_start_s": 40}
    await plane.up(document(model(tmp_path, control=assumed)))
    plane.cluster.slow = True
    traffic = Traffic(plane)
    await traffic.run(7, m=1.0)
    assert lead_s(plane) == 40
    plane.cluster.ready()
    await traffic.run(2)
    assert lead_s(plane) == pytest.approx(7, abs=0.5)
    await plane.restart()
    await traffic.run(7)
    assert lead_s(plane) == pytest.approx(7, abs=0.5)
    # The next start is expected to take as long.
    await traffic.run(9, m=2.0)
    (starting,) = logged(plane)[0].situation.supply.starting_s
    assert starting < 4


async def test_the_state_of_a_removed_model_is_dropped(plane: Plane, tmp_path: Path) -> None:
    both = document(model(tmp_path), model(tmp_path, "other"))
    traffic = await Traffic.over(plane, both, 10, m=1.0, other=1.0)
    assert {each.decision.model for each in logged(plane, 2)} == {"m", "other"}
    plane.controller.apply(document(model(tmp_path)))
    await traffic.run(20, m=1.0)
    scaler = plane.controller.autoscaler
    assert set(scaler.latest) == {"m"}
    # What was decided on it and not written is forgotten.
    read = scaler.journal.read(1000, model="other")
    assert len(read) == sum(
        isinstance(line, DecisionRound) and "other" in line.decisions for line in scaler.journal.lines()
    )
    kept = plane.state.load(plane.state.memory_path, AutoscalerState)
    assert kept is not None
    assert set(kept.memories) == set(kept.policies) == {"m"}


async def test_building_situations_yields_to_the_event_loop(plane: Plane, tmp_path: Path) -> None:
    models = [model(tmp_path, name) for name in ("m", "n", "o")]
    await Traffic.over(plane, document(*models, budget={"cpus": 9}), 8, m=1.0, n=1.0, o=1.0)
    turns, builder = 0, plane.controller.autoscaler.situations
    seen: set[int] = set()

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    class Recorder(SituationBuilder):
        def situation(self, *given: Any) -> Any:
            seen.add(turns)
            return builder.situation(*given)

    plane.controller.autoscaler.situations = Recorder(
        builder.targets, builder.observed, builder.calibrations, builder.aggregator, builder.now
    )
    counting = asyncio.create_task(count_turns())
    while not seen:
        await plane.ticks(1)
    counting.cancel()
    assert len(seen) == 3


class Slow:
    """Waits until it is released, and then proposes the maximum."""

    answers = threading.Event()

    def decide(self, view: Any, memory: Any) -> Any:
        from policy.scaling.view import Proposal  # noqa: PLC0415 - as a user's module would

        assert self.answers.wait(60)
        return Proposal(count=view.most, reason="all")


def remembered(plane: Plane) -> int:
    kept = plane.state.load(plane.state.memory_path, AutoscalerState)
    assert kept is not None
    return msgspec.convert(kept.memories["m"].policy, int)


def lead_s(plane: Plane) -> float:
    return next(r.lead_s for r in logged(plane)[0].situation.mode_options if r.mode == "multi-replica")
