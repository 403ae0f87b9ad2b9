"""Revisions: which changes of a model's configuration need new engines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from policy.config.deployment import ModelSpec, Shape
from policy.config.shared_gpus import gpu_group_of
from policy.types import EngineKind


def engine_inputs(spec: ModelSpec) -> dict[str, Any]:
    """The configuration that is fixed when an engine starts, by the keys of the deployment file.

    ``token_file`` is left out: it only fetches weights. So are timeouts: hosts take new ones while they
    run. Of adapters only slots, rank and size limits are fixed. Engines of a shared GPU group are built with
    sleep mode. Engines of an external model are known by their workload alone.
    """
    if spec.engine is EngineKind.EXTERNAL:
        return {"engine": spec.engine}
    source = "sim" if spec.engine is EngineKind.SIM else "source"
    whole = msgspec.to_builtins(spec)
    made: dict[str, Any] = {key: whole[key] for key in ("engine", "runner", "engine_args", "env", source)}
    if (group := gpu_group_of(spec)) is not None:
        made["control"] = {"mode": {"sleep": list(group.engines)}}
    if spec.adapters is not None:
        made["adapters"] = {
            key: whole["adapters"][key] for key in ("slots_per_replica", "max_rank", "max_bytes")
        }
    return made


def used_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """The shapes that modes use; no engine has any other shape."""
    used = {mode.shape for mode in spec.modes.values()}
    return {name: shape for name, shape in spec.shapes.items() if name in used}


def _made(shape: Shape) -> Shape | str:
    """What engines of a shape are made of: its workload, which has its pods, or all of it."""
    return shape.workload or shape


def built_shapes(spec: ModelSpec, before: Mapping[str, Shape]) -> ModelSpec:
    """``spec`` with the shapes of its generation: those in use, and those of ``before``.

    Replicas of a shape that is no longer used may still run, so it is kept.
    """
    return msgspec.structs.replace(spec, shapes={**before, **used_shapes(spec)})


def changed_shapes(built: Mapping[str, Shape], spec: ModelSpec) -> set[str]:
    """The shapes that differ between ``spec`` and ``built``; a new shape is no change."""
    return {
        name for name, shape in used_shapes(spec).items() if _made(built.get(name, shape)) != _made(shape)
    }


def same_engines(built: ModelSpec, spec: ModelSpec) -> bool:
    """Whether engines built from ``built`` are equal to those of ``spec``, for every shape."""
    return engine_inputs(built) == engine_inputs(spec) and not changed_shapes(built.shapes, spec)


def digest(spec: ModelSpec, shape: str = "") -> str:
    """Eight hex digits that identify the engine inputs of ``shape``, or of all used shapes."""
    shapes = {shape: spec.shapes[shape]} if shape else used_shapes(spec)
    made = {name: _made(each) for name, each in shapes.items()}
    data = msgspec.json.encode((engine_inputs(spec), made), order="deterministic")
    return hashlib.sha256(data).hexdigest()[:8]
