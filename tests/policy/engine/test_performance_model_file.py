"""Files of calibrated engine models: validation, and their use in a deployment."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.config.deployment import ModelSpec
from policy.deployment_file.diff import ChangeEffect, diff
from policy.deployment_file.parse import parse
from policy.engine.builtin_profiles import profile, shipped
from policy.engine.performance_model import BatchLimits, EngineModel
from policy.engine.performance_model_file import FitErrors, PerformanceModelFile, encode, model_file
from policy.errors import ConfigError


def made(**over: Any) -> PerformanceModelFile:
    """A file that was fitted to two H100s."""
    given: dict[str, Any] = {
        "format": 1,
        "model": "m",
        "shape": "large",
        "degree": 2,
        "engine": "vllm 0.32.0",
        "hardware": "2 x NVIDIA H100",
        "tidegate": "0.1.0",
        "at": "2026-01-31T12:00:00+00:00",
        "engine_model": EngineModel(o=1e-3, w=8e-3, c=4e-5, g=6e-8, r=1e-5),
        "limits": BatchLimits(max_num_batched_tokens=4096, max_num_seqs=128, kv_tokens=500_000),
        "max_model_len": 8192,
        "path_s": 0.003,
        "error": FitErrors(points=3, step_p50=0.02, step_p90=0.05, itl_p50=0.03, ttft_p90=0.1),
        "steps": 9000,
        "points": (),
        "prior": "h100-8b",
        "prior_model": profile("h100-8b").model,
    }
    return PerformanceModelFile(**given | over)


def content(**over: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(encode(made()))
    return decoded | over


def spec(given: Any) -> ModelSpec:
    shapes = {"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}}
    modes = {"single-large": {"shape": "large"}, "multi-replica": {"shape": "small"}}
    model = {"name": "m", "source": "a/b", "profile": given, "shapes": shapes, "modes": modes}
    return parse({"models": [model]}).models[0]


def test_a_file_round_trips() -> None:
    assert model_file(content(), "f") == made()


def test_a_file_from_before_copies_were_known_has_the_default() -> None:
    old = content()
    del old["engine_model"]["copy"]
    assert model_file(old, "f") == made()


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"format": 2}, "f.format"),
        ({"surprise": 1}, "f.surprise"),
        ({"degree": 0}, "f.degree"),
        ({"engine_model": {"o": 0, "w": 0, "c": 0, "g": 0, "r": 0}}, "f.engine_model"),
        ({"engine_model": {"o": 1, "w": -0.5, "c": 0, "g": 0, "r": 0}}, "f.engine_model.w"),
        ({"limits": {"max_num_batched_tokens": 1, "max_num_seqs": 1, "kv_tokens": 0}}, "f.limits.kv_tokens"),
        ({"error": None}, "f.error"),
    ],
)
def test_an_invalid_file_is_rejected_with_the_path(changed: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        model_file(content(**changed), "f")
    assert refused.value.path == where


def test_content_that_is_not_a_mapping_is_rejected() -> None:
    with pytest.raises(ConfigError, match="content of a model file"):
        model_file([1], "f")


def test_a_deployment_uses_the_file_as_a_profile() -> None:
    found = spec(content())
    large = shipped(found, found.shapes["large"])
    assert large.model == made().engine_model.at_degree(2)
    assert large.limits.kv_tokens == 500_000
    # At another degree memory is the prior's: one card holds less than two.
    small = shipped(found, found.shapes["small"])
    assert small.limits.kv_tokens == profile("h100-8b").limits(1).kv_tokens


def test_a_deployment_rejects_an_invalid_file() -> None:
    with pytest.raises(ConfigError) as refused:
        spec(content(format=9))
    assert refused.value.path == "models[0].profile.format"


def test_without_a_prior_the_kv_capacity_is_that_of_the_file() -> None:
    found = spec(content(prior=""))
    assert shipped(found, found.shapes["small"]).limits.kv_tokens == 500_000


def test_a_diff_shows_the_file_by_its_description() -> None:
    def deployed(given: Any) -> Any:
        model = {"name": "m", "engine": "external", "urls": ["http://127.0.0.1:1"], "profile": given}
        return parse({"models": [model]})

    (change,) = diff(deployed("h100-8b"), deployed(content()))
    assert (change.path, change.before, change.effect) == ("models[m].profile", "h100-8b", ChangeEffect.LIVE)
    assert change.after == "calibrated on m, shape large, at 2026-01-31T12:00:00+00:00"
