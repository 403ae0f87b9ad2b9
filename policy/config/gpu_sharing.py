"""Which shapes of a model share GPUs and sleep in turns, so that a switch costs a wake and no start."""

from __future__ import annotations

import msgspec

from policy.config.deployment import ModelSpec, Shape
from policy.types import EngineKind


class GpuGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of the largest shape and the engines on them; those of one GPU are never awake together.

    ``engines`` is how many there are of each shape, the largest shape first; ``gpus`` and ``cpus`` are what
    all of it takes, however many are awake.
    """

    engines: dict[str, int]
    gpus: int
    cpus: int

    @property
    def shape(self) -> str:
        """The largest shape, which is the one that the bed is asked of the cluster as."""
        return next(iter(self.engines))


def gpu_group_of(spec: ModelSpec) -> GpuGroup | None:
    """The bed that every generation of ``spec`` has one of; ``None`` where engines start and stop.

    Its engines must be able to sleep, its modes have different shapes, all of GPUs, which divide those of the
    largest, and no mode may need more than that has: what a mode has beside it would have to be started.
    """
    if spec.control.mode.sleep == "never" or not _can_sleep(spec):
        return None
    # Of a generation that leaves not all shapes may be known any more.
    known = (mode.shape for mode in spec.modes.values() if mode.shape in spec.shapes)
    shapes = {name: spec.shapes[name] for name in known}
    ordered = sorted(shapes, key=lambda name: (-shapes[name].gpus, name))
    if len(ordered) < 2 or not all(shape.gpus for shape in shapes.values()):
        return None
    gpus = shapes[ordered[0]].gpus
    if any(gpus % shape.gpus for shape in shapes.values()):
        return None
    if any(mode.bounds.max * shapes[mode.shape].gpus > gpus for mode in spec.modes.values()):
        return None
    engines = {name: gpus // shapes[name].gpus for name in ordered}
    cpus = max(count * shapes[name].cpus for name, count in engines.items())
    return GpuGroup(engines=engines, gpus=gpus, cpus=cpus)


def cards(shape: Shape, index: int) -> range:
    """Which of the GPUs of a bed its engine ``index`` of ``shape`` uses."""
    return range(index * shape.gpus, (index + 1) * shape.gpus)


def _can_sleep(spec: ModelSpec) -> bool:
    if spec.engine is EngineKind.SIM:
        return spec.sim.wake_s is not None
    return spec.engine is EngineKind.VLLM
