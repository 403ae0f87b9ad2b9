"""Shared GPU groups: shapes of a model on the same GPUs, so that a mode switch is a wake-up, not a start."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from policy.config.deployment import ModelSpec, Shape
from policy.types import EngineKind


class GpuGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of all replicas of the largest shape, and the engines on them.

    Engines on the same GPU are never awake together.

    ``engines`` is the number of engines of each shape, the largest shape first; ``gpus`` and ``cpus`` are the
    resources of the group.
    """

    engines: dict[str, int]
    gpus: int
    cpus: int

    @property
    def shape(self) -> str:
        """The largest shape; the group requests its resources."""
        return next(iter(self.engines))


def gpu_group_of(spec: ModelSpec) -> GpuGroup | None:
    """The GPU group of each generation of ``spec``; ``None`` if engines start and stop instead.

    Requirements: engines with sleep mode; modes with different shapes, all with whole GPUs whose number
    divides that of the next larger shape, so that any free GPUs can be joined; no mode needs more GPUs than
    the replicas of the largest shape.
    """
    if spec.control.mode.sleep == "never" or not _can_sleep(spec):
        return None
    # An old generation may have shapes that are no longer known.
    known = (mode.shape for mode in spec.modes.values() if mode.shape in spec.shapes)
    shapes = {name: spec.shapes[name] for name in known}
    ordered = sorted(shapes, key=lambda name: (-shapes[name].gpus, name))
    if len(ordered) < 2 or any(shape.gpus < 1 for shape in shapes.values()):
        return None
    if any(shapes[more].gpus % shapes[less].gpus for more, less in pairwise(ordered)):
        return None
    most = dict.fromkeys(ordered, 0)
    for mode in spec.modes.values():
        if mode.shape in most:
            most[mode.shape] = max(most[mode.shape], mode.bounds.max)
    gpus = int(shapes[ordered[0]].gpus) * most[ordered[0]]
    if any(count * shapes[name].gpus > gpus for name, count in most.items()):
        return None
    engines = {name: gpus // int(shapes[name].gpus) for name in ordered}
    cpus = max(count * shapes[name].cpus for name, count in engines.items())
    return GpuGroup(engines=engines, gpus=gpus, cpus=cpus)


def cards(shape: Shape, index: int) -> range:
    """The GPUs of the group that engine ``index`` of ``shape`` uses."""
    gpus = int(shape.gpus)
    return range(index * gpus, (index + 1) * gpus)


def _can_sleep(spec: ModelSpec) -> bool:
    if spec.engine is EngineKind.SIM:
        return spec.sim.wake_s is not None
    return spec.engine is EngineKind.VLLM
