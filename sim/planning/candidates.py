"""The candidates of a plan: GPU types, and the number of GPUs per replica."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

import msgspec

from policy.config.deployment import Gpus, Mode, ModelSpec, Shape
from policy.engine.builtin_profiles import PROFILES, kind_and_size, profile
from policy.engine.performance_model_file import model_file
from policy.errors import ConfigError
from policy.types import EngineKind

# Tensor-parallel degrees that are tried where the weights fit; for cores also the document's.
GPU_DEGREES = (1, 2, 4, 8)
CORE_DEGREES = (1, 2)
# The name of the shape in trials.
_SHAPE = "planned"


class Basis(StrEnum):
    """What a number rests on: a measurement, a calibration on a live replica, or an assumption."""

    MEASURED = "measured"
    CALIBRATED = "calibrated"
    ASSUMED = "assumed"


class ShapeCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A shape on one kind of device; ``degree`` devices make one replica.

    ``profile`` times its steps; ``source`` says where the profile comes from, ``basis`` how good it is.
    """

    kind: str
    profile: str | dict[str, Any]
    degree: Gpus
    device: Literal["gpu", "core"]
    shape: Shape
    basis: Basis
    source: str

    @property
    def name(self) -> str:
        """Its short name: h100 x 2."""
        return f"{self.kind} x {self.degree:g}"

    def of(self, spec: ModelSpec, count: int) -> ModelSpec:
        """``spec`` with ``count`` replicas of this shape and no others, timed by its profile."""
        mode = mode_of(count)
        timed: dict[str, Any] = {"profile": self.profile}
        if spec.engine is EngineKind.SIM and spec.profile is None:
            timed = {"sim": msgspec.structs.replace(spec.sim, profile=self.profile)}
        return msgspec.structs.replace(
            spec,
            engine=EngineKind.SIM if spec.engine is EngineKind.EXTERNAL else spec.engine,
            urls=(),
            shapes={_SHAPE: self.shape},
            modes={mode: Mode(shape=_SHAPE, replicas=count)},
            mode=mode,
            **timed,
        )


def mode_of(count: int) -> str:
    return "single-large" if count == 1 else "multi-replica"


def candidates(
    spec: ModelSpec, kinds: Sequence[str] | None = None, degrees: Sequence[int] | None = None
) -> list[ShapeCandidate]:
    """Every shape of every device kind with a profile for a model like ``spec``, where the weights fit.

    Profiles of other kinds are those of the same model size as the document's. ``kinds`` and ``degrees``
    limit the result. Raises :class:`policy.errors.ConfigError` where nothing is left.
    """
    given = spec.timed_by
    if given is None:
        raise ConfigError(f"models[{spec.name}].profile", None, f"what times it: {', '.join(PROFILES)}")
    own, size = kind_and_size(given)
    known: dict[str, str | dict[str, Any]] = {}
    if size:
        known = {name.partition("-")[0]: name for name in PROFILES if name.partition("-")[2] == size}
    known[own] = given
    for kind in kinds or ():
        if kind not in known:
            raise ConfigError("--kinds", kind, f"of those with a profile for this size: {', '.join(known)}")
    found = []
    for kind in kinds or [own, *(kind for kind in known if kind != own)]:
        without_gpus = bool(spec.shapes) and not any(shape.gpus for shape in spec.shapes.values())
        cores = kind == "cpu" or (kind == own and without_gpus)
        found += _of_kind(spec, kind, known[kind], cores, degrees)
    if not found:
        raise ConfigError("--shapes", degrees, f"a degree at which {spec.name} fits into memory")
    return found


def _of_kind(
    spec: ModelSpec, kind: str, given: str | dict[str, Any], cores: bool, degrees: Sequence[int] | None
) -> list[ShapeCandidate]:
    found = profile(given)
    fitted_at = None if isinstance(given, str) else model_file(given, "profile").degree
    written: dict[Gpus, Shape] = {
        shape.degree: shape for shape in spec.shapes.values() if bool(shape.gpus) is not cores
    }
    tried: Sequence[Gpus] = degrees or sorted({*(CORE_DEGREES if cores else GPU_DEGREES), *written})
    made = []
    for degree in tried:
        try:
            found.limits(degree)
        except ConfigError:  # the weights leave no room for KV cache
            continue
        basis = Basis.ASSUMED if found.assumed else Basis.MEASURED
        if fitted_at is not None:
            basis = Basis.CALIBRATED if degree == fitted_at else Basis.ASSUMED
        like = written.get(degree) or next(iter(written.values()), Shape())
        made.append(
            ShapeCandidate(
                kind=kind,
                profile=given,
                degree=degree,
                device="core" if cores else "gpu",
                shape=msgspec.structs.replace(
                    like,
                    gpus=0 if cores else degree,
                    cpus=degree if cores else 0,
                    tensor_parallel=1 if cores else max(1, int(degree)),
                ),
                basis=basis,
                source=found.source,
            )
        )
    return made
