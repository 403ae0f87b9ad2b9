"""Manual overrides: their duration, their author, and what clears them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy.errors import SwitchRefused
from policy.scaling.decision_types import ModeOverride
from serve.controller_api_schema import ModelStatus
from tests.serve.plane import LARGE, NEW_SMALL, READY, SMALL, Plane
from tests.serve.sim_documents import document, sim_model
from tests.serve.traffic import Traffic, by_rate


def model(folder: Path, **over: Any) -> dict[str, Any]:
    made = sim_model(**over)
    made["control"] |= {
        "tick_s": 1,
        "policy": by_rate(folder),
        "scale": {"max_step_up": 4, "max_step_down": 1, "hold_s": 1},
    }
    return made


def status(plane: Plane) -> ModelStatus:
    return plane.controller.status().models[0]


@pytest.mark.slow
async def test_a_manual_count_holds_until_it_is_cleared(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 20, m=2.0)
    assert plane.counts(READY) == {SMALL: 2}
    assert status(plane).decided_by.endswith("by_rate.py:ByRate")
    plane.controller.scale("m", 4)
    await traffic.run(60)
    assert plane.counts(READY) == {SMALL: 4}
    assert (status(plane).decided_by, status(plane).override) == (
        "by hand", ModeOverride(mode="multi-replica", count=4),
    )  # fmt: skip
    plane.controller.scale("m", None)
    await traffic.run(20)
    assert plane.counts(READY) == {SMALL: 2}
    assert status(plane).override is None


@pytest.mark.slow
async def test_an_override_duration_survives_a_controller_restart(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 10, m=1.0)
    plane.controller.scale("m", 3, 30.0)
    await traffic.run(10)
    await plane.restart()
    await traffic.run(15)
    assert plane.counts(READY) == {SMALL: 3}
    assert status(plane).decided_by == "by hand"
    await traffic.run(20)
    assert plane.counts(READY) == {SMALL: 1}


@pytest.mark.slow
async def test_a_manual_mode_leaves_the_count_to_the_policy(plane: Plane, tmp_path: Path) -> None:
    await plane.up(document(model(tmp_path)))
    traffic = Traffic(plane)
    plane.controller.mode("m", "single-large")
    await traffic.run(10, m=3.0)
    assert plane.counts(READY) == {LARGE: 1}
    assert status(plane).decided_by == "by hand"
    plane.controller.mode("m", "multi-replica", 60.0)
    await traffic.run(20)
    assert plane.counts(READY) == {SMALL: 3}
    assert status(plane).override is not None
    await traffic.run(60)
    assert status(plane).override is None


async def test_a_manual_mode_over_the_budget_is_refused(plane: Plane, tmp_path: Path) -> None:
    other = sim_model("other", control={"policy": "static"})
    # With the large one 300 W beside the 100 W that the other model holds.
    large = {"large": {"gpus": 3, "tensor_parallel": 3}, "small": {"gpus": 1}}
    models = (model(tmp_path, shapes=large), other | {"shapes": large})
    budget = {"watts": 350, "gpu_watts": 100, "cpu_watts": 0}
    traffic = await Traffic.over(plane, document(*models, budget=budget), 10, m=1.0, other=1.0)
    with pytest.raises(SwitchRefused, match="single-large x 1 exceeds the budget left"):
        plane.controller.mode("m", "single-large")
    await traffic.run(5)
    assert plane.counts(READY)[SMALL] == 1
    assert status(plane).override is None
    plane.controller.apply(document(*models, budget=budget | {"watts": 400}))
    plane.controller.mode("m", "single-large")
    await traffic.run(10)
    assert plane.counts(READY)[LARGE] == 1


async def test_a_manual_count_ends_with_a_mode_change(plane: Plane, tmp_path: Path) -> None:
    await plane.up(document(model(tmp_path)))
    traffic = Traffic(plane)
    plane.controller.scale("m", 4)
    await traffic.run(5, m=1.0)
    plane.controller.mode("m", "single-large")
    await traffic.run(5)
    assert plane.counts(READY) == {LARGE: 1}
    assert status(plane).override == ModeOverride(mode="single-large")
    plane.controller.mode("m", "multi-replica")
    await traffic.run(20)
    assert plane.counts(READY) == {SMALL: 1}


@pytest.mark.slow
async def test_a_manual_count_of_zero_is_not_woken_by_requests(plane: Plane, tmp_path: Path) -> None:
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": 0, "max": 4}}}
    traffic = await Traffic.over(plane, document(model(tmp_path, modes=modes)), 10, m=2.0)
    assert plane.controller.scale("m", 0).target == 0
    await traffic.run(10)
    assert plane.counts() == {}
    assert plane.phase() == "idle"
    # Waiting requests do not wake a model that was set to zero.
    traffic.queued["m"] = 3
    await traffic.run(10)
    assert plane.counts() == {}
    plane.controller.scale("m", None)
    await traffic.run(10)
    assert plane.counts(READY)[SMALL] >= 1


async def test_a_manual_count_is_clamped_to_new_bounds(plane: Plane, tmp_path: Path) -> None:
    await plane.up(document(model(tmp_path)))
    traffic = Traffic(plane)
    plane.controller.scale("m", 4)
    await traffic.run(5, m=1.0)
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 3}}}
    plane.controller.apply(document(model(tmp_path, modes=modes)))
    await traffic.run(10)
    assert plane.counts(READY) == {SMALL: 3}
    assert status(plane).override == ModeOverride(mode="multi-replica", count=3)


async def test_a_manual_mode_that_fails_is_cleared(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, document(model(tmp_path)), 5, m=1.0)
    plane.cluster.failing[LARGE] = "out of memory"
    plane.controller.mode("m", "single-large")
    await traffic.run(20)
    assert plane.counts(READY) == {SMALL: 1}
    assert status(plane).override is None
    assert "rolled back from single-large x 1" in plane.note()
    deploys = [event for event in plane.controller.status().events if "target single-large" in event]
    assert len(deploys) == 1


@pytest.mark.slow
async def test_a_manual_count_survives_a_new_revision(plane: Plane, tmp_path: Path) -> None:
    await plane.up(document(model(tmp_path)))
    traffic = Traffic(plane)
    plane.controller.scale("m", 3)
    await traffic.run(5, m=1.0)
    plane.controller.apply(document(model(tmp_path, sim={"profile": "sim-small", "seed": 7})))
    await traffic.run(30)
    assert plane.counts(READY) == {NEW_SMALL: 3}
