"""Which models have a GPU group, and the engines on it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from policy.config.engine_revision import digest, same_engines
from policy.config.shared_gpus import GpuGroup, cards, gpu_group_of
from policy.deployment_file.diff import ChangeEffect, diff
from tests.serve.sim_documents import deployment, sim_model


def spec(**over: Any) -> Any:
    written: dict[str, Any] = {
        "sim": {"profile": "sim-small", "wake_s": 1.0},
        "shapes": {
            "small": {"gpus": 2, "tensor_parallel": 2, "cpus": 3},
            "large": {"gpus": 8, "tensor_parallel": 8, "cpus": 8},
        },
        "modes": {
            "multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 4}},
            "single-large": {"shape": "large"},
        },
    }
    return deployment(sim_model(**written | over)).models[0]


def test_a_gpu_group_has_the_largest_shape_and_the_others_that_fit() -> None:
    group = gpu_group_of(spec())
    assert group == GpuGroup(engines={"large": 1, "small": 4}, gpus=8, cpus=12)
    assert group.shape == "large"
    assert [list(cards(spec().shapes["small"], i)) for i in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "over",
    [
        {"sim": {"profile": "sim-small"}},
        {"control": {"mode": {"sleep": "never"}}},
        {"modes": {"single-large": {"shape": "large"}}},
        {"modes": {"multi-replica": {"shape": "large"}, "single-large": {"shape": "large"}}},
        {"shapes": {"small": {"cpus": 1}, "large": {"gpus": 8, "tensor_parallel": 8}}},
        {"shapes": {"small": {"gpus": 3, "tensor_parallel": 3}, "large": {"gpus": 8, "tensor_parallel": 8}}},
        {
            "modes": {
                "multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 5}},
                "single-large": {"shape": "large"},
            }
        },
    ],
    ids=["cannot sleep", "never", "one mode", "one shape", "cores", "does not divide", "needs more"],
)
def test_these_models_have_no_gpu_group(over: dict[str, Any]) -> None:
    assert gpu_group_of(spec(**over)) is None


@pytest.mark.parametrize(
    ("modes", "gpus", "engines"),
    [
        ({8: 1, 4: 2, 1: 8}, 8, {"g8": 1, "g4": 2, "g1": 8}),
        ({4: 2, 1: 8}, 8, {"g4": 2, "g1": 8}),
        ({4: 2, 2: 3}, 8, {"g4": 2, "g2": 4}),
        ({4: 3, 2: 1, 1: 12}, 12, {"g4": 3, "g2": 6, "g1": 12}),
        ({4: 1, 1: 8}, 0, {}),
        ({6: 1, 3: 2, 2: 3}, 0, {}),
    ],
)
def test_the_engines_of_a_ladder_of_modes(modes: dict[int, int], gpus: int, engines: dict[str, int]) -> None:
    shapes = {f"g{size}": {"gpus": size, "tensor_parallel": size} for size in modes}
    made = spec(
        shapes=shapes,
        modes={
            f"by-{size}": {"shape": f"g{size}", "replicas": {"min": 1, "max": most}}
            for size, most in modes.items()
        },
    )
    group = gpu_group_of(made)
    if group is None:
        assert not engines
        return
    assert (group.gpus, group.engines) == (gpus, engines)
    blocks = [[set(cards(made.shapes[name], i)) for i in range(n)] for name, n in group.engines.items()]
    for larger, smaller in pairwise(blocks):
        assert sorted(card for block in smaller for card in block) == list(range(gpus))
        assert all(sum(block <= outer for outer in larger) == 1 for block in smaller)


def test_vllm_models_share_gpus_by_default() -> None:
    assert gpu_group_of(spec(engine="vllm", source="ORG/NAME", sim={})) is not None


@pytest.mark.parametrize(
    ("key", "becomes", "effect"),
    [
        ("sleep", "never", ChangeEffect.NEW_GENERATION),
        ("dwell_s", 5.0, ChangeEffect.LIVE),
        # More replicas than fit end the sharing.
        ("max", 5, ChangeEffect.NEW_GENERATION),
        ("max", 3, ChangeEffect.LIVE),
    ],
)
def test_a_change_has_its_effect_on_engines_of_a_gpu_group(
    key: str, becomes: Any, effect: ChangeEffect
) -> None:
    written = {
        "sim": {"profile": "sim-small", "wake_s": 1.0},
        "shapes": {"small": {"gpus": 2, "tensor_parallel": 2}, "large": {"gpus": 8, "tensor_parallel": 8}},
    }
    small: dict[str, Any] = {"shape": "small", "replicas": {"min": 1, "max": 4}}
    modes = {"multi-replica": small, "single-large": {"shape": "large"}}
    before = deployment(sim_model(**written, modes=modes))
    if key == "max":
        modes = modes | {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": becomes}}}
        after = deployment(sim_model(**written, modes=modes))
    else:
        control = {"mode": {"drain_timeout_s": 10, key: becomes}, "start_timeout_s": 60}
        after = deployment(sim_model(**written, modes=modes, control=control))
    assert [change.effect for change in diff(before, after)] == [effect]


def test_engines_differ_by_gpu_group_and_not_by_a_count_within_it() -> None:
    never = spec(control={"mode": {"sleep": "never"}})
    assert not same_engines(spec(), never)
    assert digest(spec(), "small") != digest(never, "small")
    fewer = spec(
        modes={
            "multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 3}},
            "single-large": {"shape": "large"},
        }
    )
    assert same_engines(spec(), fewer)
