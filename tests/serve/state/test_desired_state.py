"""Targets: the desired mode, the fallback, and the effect of a new configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.config.deployment import ModelSpec
from policy.config.engine_revision import digest
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator.interface import ActuatorLayer
from serve.state.desired_state import (
    DesiredMode,
    ExpectedGain,
    ModelTarget,
    ModelTargets,
    SwitchBlock,
    first_target,
    found_target,
)
from store.database import Database
from store.election.database_state_dir import DatabaseStateDir
from store.state_dir import StateDir
from tests.serve.sim_documents import deployment, sim_model

OTHER = {"profile": "sim-small", "seed": 7}


def spec(**over: Any) -> ModelSpec:
    return deployment(sim_model(**over)).models[0]


def settled(target: ModelTarget) -> ModelTarget:
    return msgspec.structs.replace(target, settled=True, fallback=None, gap=False)


@pytest.fixture
def first() -> ModelTarget:
    return first_target(spec(), (), now=10.0)


def test_first_target_has_a_replica_of_an_unused_generation() -> None:
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": 0, "max": 2}}}
    held = [LayerKey("m", "small", 3), LayerKey("other", "small", 9)]
    aim = first_target(spec(modes=modes), held, now=0.0).aim
    assert (aim.count, aim.generation) == (1, 4)


def test_reached_target_is_the_fallback(first: ModelTarget) -> None:
    served = settled(first)
    target = served.toward(served.in_mode("single-large"), now=20.0, gap=True)
    assert (target.fallback, target.since, target.settled, target.gap) == (served.aim, 20.0, False, True)
    failed = target.back("why", now=30.0)
    assert (failed.aim, failed.fallback, failed.note, failed.since) == (served.aim, None, "why", 30.0)
    # A rollback may have a gap: the rejected target does not serve.
    assert failed.gap


def test_a_restored_target_has_no_instants_of_a_clock_that_was_ahead(first: ModelTarget) -> None:
    served = msgspec.structs.replace(settled(first), created=7200.0)
    failed = served.toward(served.in_mode("single-large"), now=7200.0).back("why", now=7260.0)
    large = failed.toward(failed.in_mode("single-large"), now=7300.0, gap=True)
    gain = ExpectedGain(at=7300.0, was="a", mode="b", gain=0.1, cost=1.0, met=1.0, settled_at=7350.0)
    target = msgspec.structs.replace(large, drained_at=7400.0, ends_at=7500.0, promise=gain).restored(100.0)
    assert (target.since, target.created, target.drained_at) == (100.0, 100.0, 100.0)
    assert target.barred == {"single-large": SwitchBlock(attempts=1, until=220.0)}
    assert target.ends_at == 100.0 + target.spec.control.mode.drain_timeout_s
    assert target.promise == msgspec.structs.replace(gain, settled_at=100.0)
    # Those of the past stay.
    assert large.restored(9000.0) == large


def test_unreached_target_is_no_fallback(first: ModelTarget) -> None:
    served = settled(first)
    large = served.toward(served.in_mode("single-large"), now=20.0)
    adopted = large.adopting(spec(sim=OTHER), now=30.0)
    assert adopted.aim.generation == 2
    assert adopted.fallback == served.aim


def test_changed_count_and_reverted_switch_have_no_fallback(first: ModelTarget) -> None:
    served = settled(first)
    more = served.toward(msgspec.structs.replace(served.aim, count=3), now=20.0)
    assert more.fallback is None
    large = served.toward(served.in_mode("single-large"), now=20.0)
    assert large.toward(large.in_mode("multi-replica"), now=25.0).fallback is None


def test_running_configuration_keeps_its_generation(first: ModelTarget) -> None:
    tried = settled(first).adopting(spec(sim=OTHER), now=20.0)
    assert tried.adopting(spec(), now=30.0).aim == first.aim


@pytest.mark.parametrize(("low", "high", "count"), [(2, 4, 2), (1, 4, 1), (1, 1, 1)])
def test_count_is_clamped(first: ModelTarget, low: int, high: int, count: int) -> None:
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": low, "max": high}}}
    assert settled(first).adopting(spec(modes=modes), now=20.0).aim.count == count


def test_removed_mode_is_a_fallback(first: ModelTarget) -> None:
    modes = {"single-large": {"shape": "large", "replicas": 1}}
    adopted = settled(first).adopting(spec(modes=modes), now=20.0)
    assert adopted.key() == LayerKey("m", "large", 1)
    back = adopted.back("why", now=30.0)
    assert back.key() == LayerKey("m", "small", 1)
    assert (back.bounds.min, back.bounds.max) == (1, 1)


def test_changed_shape_is_a_new_target(first: ModelTarget) -> None:
    modes = {"multi-replica": {"shape": "large", "replicas": {"min": 1, "max": 4}}}
    adopted = settled(first).adopting(spec(modes=modes), now=20.0)
    assert (adopted.key(), adopted.fallback) == (LayerKey("m", "large", 1), first.aim)


def test_failed_configuration_is_rejected_until_adopted(first: ModelTarget) -> None:
    bad = spec(sim=OTHER)
    failed = settled(first).adopting(bad, now=20.0).back("why", now=30.0)
    assert failed.rejected == digest(bad)
    more = failed.toward(msgspec.structs.replace(failed.aim, count=2), now=40.0)
    assert more.rejected == digest(bad)
    assert more.adopting(bad, now=50.0).rejected == ""


def test_failed_mode_rejects_no_configuration(first: ModelTarget) -> None:
    served = settled(first)
    assert served.toward(served.in_mode("single-large"), now=20.0).back("why", now=30.0).rejected == ""


SHAPES = {"large": {"cpus": 2}, "small": {"cpus": 1}}
LARGE_ONLY = {"single-large": {"shape": "large", "replicas": 1}}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"control": {"mode": {"drain_timeout_s": 10}, "start_timeout_s": 5}}, True),
        ({"token_file": "/t"}, True),
        ({"source": "package:of-no-use-to-sim"}, True),
        ({"modes": LARGE_ONLY}, True),
        ({"modes": LARGE_ONLY, "shapes": {"large": {"cpus": 2}, "small": {"cpus": 2}}}, True),
        ({"shapes": {**SHAPES, "idle": {"cpus": 3}}}, True),
        ({"control": {"mode": {"drain_timeout_s": 11}, "progress_timeout_s": 5}}, True),
        ({"sim": OTHER}, False),
        ({"env": {"A": "1"}}, False),
        ({"engine_args": {"max_model_len": 64}}, False),
        ({"shapes": {**SHAPES, "small": {"cpus": 1, "max_in_flight": 3}}}, False),
    ],
)
def test_only_changed_engines_are_a_new_generation(
    first: ModelTarget, change: dict[str, Any], same: bool
) -> None:
    assert (settled(first).adopting(spec(**change), now=20.0).aim.generation == 1) is same


def test_running_shape_is_not_redefined(first: ModelTarget) -> None:
    small = LayerKey("m", "small", 1)
    without = settled(first).adopting(spec(modes=LARGE_ONLY), now=20.0)
    again = spec(shapes={"large": {"cpus": 2}, "small": {"cpus": 1, "max_in_flight": 3}})
    # A shape is remembered only while replicas of it run.
    assert without.pruned({small}).adopting(again, now=30.0).aim.generation == 2
    reached = settled(without)
    assert not reached.keeps(small)
    assert reached.pruned(set()).adopting(again, now=30.0).aim.generation == 1


def test_fallback_layers_are_kept(first: ModelTarget) -> None:
    served = settled(first)
    adopted = served.adopting(spec(sim=OTHER), now=20.0)
    kept = [LayerKey("m", shape, generation) for generation in (1, 2) for shape in ("small", "large")]
    assert all(adopted.keeps(key) for key in kept)
    assert adopted.pruned(set()) == adopted
    done = settled(adopted)
    assert [done.keeps(key) for key in kept] == [False, False, True, True]
    assert set(done.pruned({kept[0]}).specs) == {1, 2}
    assert set(done.pruned(set()).specs) == {2}


def test_a_running_layer_becomes_the_target_of_the_same_digest() -> None:
    small, large = digest(spec(), "small"), digest(spec(), "large")
    held = {
        LayerKey("m", "large", 2): ActuatorLayer(wanted=1, digest=large),
        LayerKey("m", "small", 2): ActuatorLayer(wanted=3, digest=small),
        LayerKey("m", "small", 1): ActuatorLayer(wanted=4, digest="another"),
        LayerKey("m", "gone", 1): ActuatorLayer(wanted=5, digest=small),
        LayerKey("x", "small", 1): ActuatorLayer(wanted=9, digest=small),
    }
    found = found_target(spec(), held, now=5.0)
    assert found is not None
    assert found.aim == DesiredMode(mode="multi-replica", shape="small", count=3, generation=2)
    assert found_target(spec(sim=OTHER), held, now=5.0) is None
    assert found_target(spec(), {}, now=5.0) is None


@pytest.mark.parametrize("elected", [False, True])
def test_targets_of_another_version_are_set_aside(tmp_path: Path, elected: bool) -> None:
    database = Database(f"sqlite:///{tmp_path / 'state.db'}")
    state = DatabaseStateDir(tmp_path, database, 1) if elected else StateDir(tmp_path)
    foreign = {"m": {"aim": {"mode": "x"}}}
    state.save(state.targets_path, foreign)
    assert ModelTargets(state).names() == ()
    # The next start has nothing to set aside.
    assert state.load(state.targets_path, object) is None
    ModelTargets(state).put("m", first_target(spec(), (), now=10.0))
    assert ModelTargets(state).names() == ("m",)
    if not elected:
        kept = state.targets_path.with_suffix(".unreadable")
        assert msgspec.json.decode(kept.read_bytes()) == foreign
    database.close()
