"""Engine models fitted to live replicas: their samples and their storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy.config.deployment import ModelSpec
from policy.engine.builtin_profiles import shipped
from policy.engine.performance_model import EngineModel
from policy.engine.step_samples import StepSample
from policy.types import ReplicaPhase
from policy.wire.controller_reports import EngineReport
from policy.wire.heartbeat import Heartbeat
from serve.autoscaler.live_model_fitting import SAVE_EVERY_S, VALID_S, CalibrationStore
from store.state_dir import StateDir
from tests.serve.replicas import replica
from tests.serve.sim_documents import deployment, sim_model

LOADS = [(n, 100.0 * n, r) for n, r in ((1, 1), (4, 4), (16, 16), (64, 32), (200, 40), (800, 64), (1600, 90))]


def spec(**over: Any) -> ModelSpec:
    return deployment(sim_model(**over)).models[0]


def prior(of: ModelSpec, shape: str = "small") -> EngineModel:
    model = shipped(of, of.shapes[shape]).model
    assert model is not None
    return model


def beat(truth: EngineModel, name: str = "r", **over: Any) -> Heartbeat:
    steps = tuple(
        StepSample(count=5, tokens=n, kv_tokens=k, running=r, seconds=truth.step_time(n, k, r))
        for n, k, r in LOADS
    )
    return Heartbeat(replica=replica(name, **over), engine=EngineReport(steps=steps))


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path).ensure()


def learned(state: StateDir, factor: float, of: ModelSpec | None = None) -> CalibrationStore:
    made, of = CalibrationStore(state), of or spec()
    for second in range(40):
        made.take(beat(prior(of).faster(1 / factor)), of, prior(of), float(second))
        made.learn(float(second))
    return made


def test_the_prior_applies_without_measurements(state: StateDir) -> None:
    made = CalibrationStore(state)
    assert made.fitted(spec(), "small") is None
    assert made.assumed(spec(), "large", prior(spec(), "large")) is None
    assert made.slowness("r", prior(spec()), 0.0) == 1.0


def test_reported_steps_replace_the_prior(state: StateDir) -> None:
    made = learned(state, 3.0)
    fit = made.fitted(spec(), "small")
    assert fit is not None
    assert fit.version >= 1
    assert fit.error < 0.05
    for n, k, r in LOADS:
        assert fit.model.step_time(n, k, r) == pytest.approx(3 * prior(spec()).step_time(n, k, r), rel=0.1)


def test_unmeasured_shape_gets_the_correction_of_others(state: StateDir) -> None:
    large = prior(spec(), "large")
    assumed = learned(state, 3.0).assumed(spec(), "large", large)
    assert assumed is not None
    assert assumed.step_time(100, 1000, 10) == pytest.approx(3 * large.step_time(100, 1000, 10), rel=0.1)


def test_fits_survive_a_restart(state: StateDir) -> None:
    made, large = learned(state, 3.0), prior(spec(), "large")
    fit = made.fitted(spec(), "small")
    again = CalibrationStore(state).fitted(spec(), "small")
    assert CalibrationStore(state).assumed(spec(), "large", large) == made.assumed(spec(), "large", large)
    assert again is not None
    assert (again.model, again.version) == (fit.model if fit else None, fit.version if fit else None)
    # The drain timeout does not change the engine; its arguments do.
    assert CalibrationStore(state).fitted(spec(control={"mode": {"drain_timeout_s": 3}}), "small") is not None
    assert CalibrationStore(state).fitted(spec(engine_args={"max_num_seqs": 3}), "small") is None


def test_changed_engine_is_measured_again(state: StateDir) -> None:
    made, other = learned(state, 3.0), spec(engine_args={"max_num_seqs": 3})
    made.take(beat(prior(other)), other, prior(other), 50.0)
    made.learn(50.0)
    assert made.fitted(other, "small") is None
    assert made.fitted(spec(), "small") is None


def test_samples_are_saved_every_minute(state: StateDir) -> None:
    made, of = CalibrationStore(state), spec()
    made.take(beat(prior(of)), of, prior(of), 0.0)
    made.learn(1.0)
    assert not list(state.root.glob("calibrations/*"))
    made.take(beat(prior(of)), of, prior(of), SAVE_EVERY_S)
    made.learn(SAVE_EVERY_S)
    (file,) = state.calibrations.iterdir()
    assert file.name == "m+small.json"


def test_unreadable_file_is_ignored(state: StateDir) -> None:
    learned(state, 3.0)
    (file,) = state.calibrations.iterdir()
    file.write_text("{")
    assert CalibrationStore(state).fitted(spec(), "small") is None


def test_slowness_is_measured_while_fitting_is_paused(state: StateDir) -> None:
    made, model = CalibrationStore(state), prior(spec())
    for second in range(10):
        made.take(beat(model.faster(0.5)), spec(), model, float(second), learns=False)
        made.learn(float(second))
    assert made.fitted(spec(), "small") is None
    assert made.slowness("r", model, 10.0) == pytest.approx(2.0, rel=0.05)


def test_slowness_of_each_replica_expires(state: StateDir) -> None:
    made, model = learned(state, 1.0), prior(spec())
    made.take(beat(model, "quick"), spec(), model, 100.0)
    made.take(beat(model.faster(0.5), "slow"), spec(), model, 100.0)
    assert made.slowness("quick", model, 100.0) == pytest.approx(1.0, rel=0.05)
    assert made.slowness("slow", model, 100.0) == pytest.approx(2.0, rel=0.05)
    assert made.slowness("slow", model, 101.0 + VALID_S) == 1.0
    made.take(beat(model, "slow", state=ReplicaPhase.STOPPED), spec(), model, 101.0)
    assert made.slowness("slow", model, 101.0) == 1.0


def test_samples_of_a_killed_replica_are_dropped(state: StateDir) -> None:
    of = spec()
    made = CalibrationStore(state)
    made.take(beat(prior(of), "killed"), of, prior(of), 1000.0)
    made.take(beat(prior(of), "lives"), of, prior(of), 1000.0 + VALID_S)
    made.take(beat(prior(of), "lives"), of, prior(of), 1001.0 + 2 * VALID_S)
    assert set(made._recent) == {"lives"}
