"""What makes an engine: which changes of a model's configuration need a new generation of replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from policy.config.deployment import ModelSpec, Shape
from policy.config.gpu_sharing import gpu_group_of
from policy.types import EngineKind


def engine_inputs(spec: ModelSpec) -> dict[str, Any]:
    """What every engine of the model is made of and told when it starts, by the document's own keys.

    ``token_file`` only fetches the weights. The timeouts are a host's for life: it drains and
    watches its engine by them, and Serve waits for its end. Of adapters an engine is made to hold so many of
    such a rank and size; which ones there are it is told while it runs. Engines of a bed are made to sleep.
    """
    source = "sim" if spec.engine is EngineKind.SIM else "source"
    whole = msgspec.to_builtins(spec)
    made: dict[str, Any] = {key: whole[key] for key in ("engine", "runner", "engine_args", "env", source)}
    control = whole["control"]
    made["control"] = {
        "mode": {"drain_timeout_s": control["mode"]["drain_timeout_s"]},
        "progress_timeout_s": control["progress_timeout_s"],
    }
    if (bed := gpu_group_of(spec)) is not None:
        made["control"]["mode"]["sleep"] = list(bed.engines)
    if spec.adapters is not None:
        made["adapters"] = {
            key: whole["adapters"][key] for key in ("slots_per_replica", "max_rank", "max_bytes")
        }
    return made


def used_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """The shapes that a mode names: no engine is made of the others."""
    used = {mode.shape for mode in spec.modes.values()}
    return {name: shape for name, shape in spec.shapes.items() if name in used}


def built_shapes(spec: ModelSpec, before: Mapping[str, Shape]) -> ModelSpec:
    """``spec`` with the shapes that its generation is built of: those in use, and those of ``before``.

    Replicas of a shape that is used no longer may still run, so what it was is kept.
    """
    return msgspec.structs.replace(spec, shapes={**before, **used_shapes(spec)})


def changed_shapes(built: Mapping[str, Shape], spec: ModelSpec) -> set[str]:
    """The shapes that ``spec`` would build otherwise than ``built`` says; one of them alone is no change."""
    return {name for name, shape in used_shapes(spec).items() if built.get(name, shape) != shape}


def same_engines(built: ModelSpec, spec: ModelSpec) -> bool:
    """Whether the engines that were built from ``built``, of each of its shapes, are those of ``spec``."""
    return engine_inputs(built) == engine_inputs(spec) and not changed_shapes(built.shapes, spec)


def digest(spec: ModelSpec, shape: str = "") -> str:
    """Eight hex digits over what makes the engines of ``shape``, or of every shape that is used."""
    shapes = {shape: spec.shapes[shape]} if shape else used_shapes(spec)
    data = msgspec.json.encode((engine_inputs(spec), shapes), order="deterministic")
    return hashlib.sha256(data).hexdigest()[:8]
