"""The shape that is calibrated, and its prior performance model."""

from __future__ import annotations

from typing import Any, cast

import pytest

from policy.engine.builtin_profiles import profile
from policy.errors import PreconditionFailed, TargetError
from policy.types import FleetSnapshot, Replica, ReplicaLoad, ReplicaPhase
from serve.controller.client import ControllerClient
from serve.controller_api_schema import ControllerStatus, ModelStatus
from tests.policy.engine.test_performance_model_file import content
from tests.serve.sim_documents import deployment, sim_model
from tidegate.calibrate.calibration import ServedShape, served_shape


class FakeController:
    """A controller with one model, whose shape ``small`` has ``ready`` replicas."""

    def __init__(self, ready: int = 1, phase: str = "steady") -> None:
        self._ready = ready
        self._phase = phase

    def status(self) -> ControllerStatus:
        model = ModelStatus(
            name="m", engine="sim", mode="multi-replica", shape="small", generation=1, target=1,
            ready=self._ready, phase=self._phase,
        )  # fmt: skip
        return ControllerStatus(actuator="memory", epoch=0.0, pid=1, models=(model,))

    def fleet(self) -> FleetSnapshot:
        states = [ReplicaPhase.READY] * self._ready + [ReplicaPhase.DRAINING]
        replicas = tuple(
            Replica(
                id=f"r{i}", model="m", shape="small", generation=1, state=state, load=ReplicaLoad(at=0.0),
                max_model_len=1000 - i,
            )
            for i, state in enumerate(states)
        )  # fmt: skip
        return FleetSnapshot(epoch=0.0, version=1, at=0.0, replicas=replicas)


def found(controller: FakeController | None = None, shape: str | None = None, **model: Any) -> ServedShape:
    client = cast("ControllerClient", controller or FakeController())
    return served_shape(client, deployment(sim_model(**model)), "m", shape)


def test_the_serving_shape_is_calibrated() -> None:
    subject = found(FakeController(ready=3), "small", profile="h100-8b")
    assert (subject.shape, subject.degree, subject.replicas, subject.max_model_len) == ("small", 1, 3, 998)
    assert (subject.name, subject.prior) == ("h100-8b", profile("h100-8b").model)


def test_a_simulated_engine_without_a_profile_has_its_default() -> None:
    assert found().name == "sim-small"


def test_a_calibrated_model_keeps_its_prior() -> None:
    subject = found(profile=content())
    assert subject.name == "h100-8b"
    assert subject.prior.o == content()["engine_model"]["o"]


def test_an_unknown_model_has_a_prior_at_its_degree() -> None:
    model: dict[str, Any] = {
        "engine": "vllm",
        "source": "a/b",
        "shapes": {"small": {"gpus": 4, "tensor_parallel": 4}},
    }
    subject = found(**model, modes={"multi-replica": {"shape": "small"}})
    assert (subject.name, subject.degree, subject.prior.degree) == ("", 4, 4)
    assert subject.prior.step_time(64, 1000, 8) == pytest.approx(
        subject.prior.w / 4 + subject.prior.o, rel=0.2
    )


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"engine": "vllm", "source": "a/b", "runner": "pooling"}, "writes no text"),
        ({"name": "n"}, "no model is called 'm'"),
    ],
)
def test_models_that_cannot_be_calibrated_are_refused(over: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        found(**over)


def test_external_servers_cannot_be_calibrated() -> None:
    document = deployment({"name": "m", "engine": "external", "urls": ["http://127.0.0.1:1"]})
    with pytest.raises(TargetError, match="report no steps"):
        served_shape(cast("ControllerClient", FakeController()), document, "m", None)


@pytest.mark.parametrize("controller", [FakeController(ready=0), FakeController(phase="switching")])
def test_a_model_that_is_not_steady_is_refused(controller: FakeController) -> None:
    with pytest.raises(PreconditionFailed, match="wait until it is steady"):
        found(controller)


def test_a_model_that_the_controller_does_not_know_is_refused() -> None:
    document = deployment(sim_model("new"))
    with pytest.raises(TargetError, match="the controller does not know it"):
        served_shape(cast("ControllerClient", FakeController()), document, "new", None)
