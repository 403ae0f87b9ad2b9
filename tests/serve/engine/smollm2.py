"""LoRA adapters of random numbers for the bundled model, which change its answers, and bad ones."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from store.adapters import CONFIG, WEIGHTS
from tests.store.adapters.making import named, weights

HIDDEN, LAYERS, MLP = 576, 30, 1536
# Outputs and inputs of each module.
SHAPES = {
    "self_attn.q_proj": (576, HIDDEN),
    "self_attn.k_proj": (192, HIDDEN),
    "self_attn.v_proj": (192, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 576),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
QV = ("q_proj", "v_proj")
Files = dict[str, bytes]


def adapter(
    seed: int, *, rank: int = 8, modules: tuple[str, ...] = QV, hidden: int = HIDDEN, **config: Any
) -> Files:
    """The two files of an adapter of ``rank`` on ``modules`` of every layer, over inputs of ``hidden``."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, (outputs, width) in SHAPES.items():
            if name.split(".")[1] not in modules:
                continue
            module = f"model.layers.{layer}.{name}"
            inputs = hidden if width == HIDDEN else width
            tensors[named(module, "A")] = random.normal(0, inputs**-0.5, (rank, inputs)).astype(np.float32)
            tensors[named(module, "B")] = random.normal(0, 0.3, (outputs, rank)).astype(np.float32)
    configuration = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "smollm2", "r": rank,
        "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none", "lora_dropout": 0.0,
    }  # fmt: skip
    return {CONFIG: json.dumps({**configuration, **config}).encode(), WEIGHTS: weights(tensors)}


def bad_adapters() -> dict[str, Files]:
    """Adapters that the import refuses, by their fault."""
    good = adapter(1)
    return {
        "rank": adapter(1, rank=64),
        "dora": adapter(1, use_dora=True),
        # vLLM accepts narrower ones without an error.
        "width": adapter(1, hidden=640),
        "module": adapter(1) | {WEIGHTS: good[WEIGHTS].replace(b"q_proj", b"x_proj")},
        "no json": good | {CONFIG: b"{"},
        "no rank": good | {CONFIG: b"{}"},
        "truncated": good | {WEIGHTS: good[WEIGHTS][:-1000]},
        "no header": good | {WEIGHTS: b"\xff" * 100},
        "empty": good | {WEIGHTS: b""},
        "no weights": {CONFIG: good[CONFIG]},
        "pickle": {CONFIG: good[CONFIG], "adapter_model.bin": b"cos\nsystem\n(S'true'\ntR."},
    }
