"""Adapters for a small model: valid ones and modified ones."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from store.adapters import CONFIG, WEIGHTS
from store.adapters.base_model_shapes import BaseModelShapes
from store.adapters.import_adapter import ImportLimits
from store.adapters.validate import ValidationLimits

RANK, HIDDEN, OUT = 4, 16, 24
LIMITS = ValidationLimits(max_rank=8, max_bytes=2_000_000)
MODULES = tuple(f"model.layers.{layer}.self_attn.{side}_proj" for layer in range(2) for side in "qv")
BASE = BaseModelShapes(
    {
        **dict.fromkeys(MODULES, (OUT, HIDDEN)),
        "model.layers.0.mlp.down_proj": (HIDDEN, OUT),
        "model.embed_tokens": (100, HIDDEN),
        "lm_head": (100, HIDDEN),
    }
)
TERMS = ImportLimits(BASE, LIMITS)

CONFIGURATION: dict[str, Any] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "task_type": "CAUSAL_LM",
    "init_lora_weights": True,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}

Tensors = dict[str, np.ndarray[Any, Any]]


def named(module: str, side: str) -> str:
    """The tensor of one half, as PEFT calls it."""
    return f"base_model.model.{module}.lora_{side}.weight"


def half_pairs(seed: int = 1, rank: int = RANK) -> Tensors:
    """Both halves of every module, of random numbers."""
    random = np.random.default_rng(seed)
    found: Tensors = {}
    for module in MODULES:
        found[named(module, "A")] = random.normal(size=(rank, HIDDEN)).astype(np.float32)
        found[named(module, "B")] = random.normal(size=(OUT, rank)).astype(np.float32)
    return found


_TYPES = {"float32": "F32", "float16": "F16", "float64": "F64", "int32": "I32"}


def header_of(tensors: Tensors) -> dict[str, Any]:
    """The header of a file of tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in tensors.items():
        end = at + array.nbytes
        header[name] = {
            "dtype": _TYPES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [at, end],
        }
        at = end
    return header


def weights(tensors: Tensors, header: Mapping[str, Any] | bytes | None = None) -> bytes:
    """The file of the tensors, with another ``header`` if one is given."""
    text = header if isinstance(header, bytes) else json.dumps(header or header_of(tensors)).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values())


def files(seed: int = 1, **configuration: Any) -> dict[str, bytes]:
    """A valid adapter, or one with a changed configuration."""
    return {
        CONFIG: json.dumps({**CONFIGURATION, **configuration}).encode(),
        WEIGHTS: weights(half_pairs(seed)),
    }


def write(folder: Path, content: Mapping[str, bytes]) -> Path:
    """The files in a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def zipped(content: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """The files as a zip."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return whole.getvalue()


def tarred(
    content: Mapping[str, bytes], extra: list[tarfile.TarInfo] | None = None, *, compressed: bool = True
) -> bytes:
    """The files as a tar, compressed or not, behind members without content."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for member in extra or []:
            archive.addfile(member)
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(whole.getvalue(), 1) if compressed else whole.getvalue()


def member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """A member of a tar that is no regular file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info
