"""The file of a calibrated engine model: coefficients, the measured load points and the error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from policy.config.control import Section
from policy.config.convert import convert
from policy.engine.performance_model import BatchLimits, EngineModel
from policy.errors import ConfigError

FORMAT: Literal[1] = 1

_Positive = Annotated[int, Meta(ge=1)]
_NotNegative = Annotated[float, Meta(ge=0)]


class MeasuredAndPredicted(Section, frozen=True):
    """One number of a load point: what clients ``measured``, and what the fitted engine ``predicted``."""

    measured: _NotNegative
    predicted: _NotNegative

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1.0) if self.measured else 0.0


class PointResult(Section, frozen=True):
    """A load point of ``seconds``: ``concurrency`` clients at each replica, each sending sequentially.

    ``requests`` ended and ``steps`` were timed. A point that was ``held`` out is not part of the fit. The
    quantiles are in seconds, ``None`` if no request ended.
    """

    concurrency: _Positive
    input_tokens: _Positive
    output_tokens: _Positive
    held: bool
    seconds: _NotNegative
    requests: Annotated[int, Meta(ge=0)]
    steps: Annotated[int, Meta(ge=0)]
    itl_p50: MeasuredAndPredicted | None = None
    ttft_p50: MeasuredAndPredicted | None = None
    ttft_p90: MeasuredAndPredicted | None = None


class FitErrors(Section, frozen=True):
    """Relative errors on the ``points`` load points that were held out.

    ``step_p50`` and ``step_p90`` are quantiles over engine steps; ``itl_p50`` and ``ttft_p90`` mean errors
    of these client-side quantiles.
    """

    points: Annotated[int, Meta(ge=0)]
    step_p50: _NotNegative
    step_p90: _NotNegative
    itl_p50: _NotNegative
    ttft_p90: _NotNegative


class PerformanceModelFile(Section, frozen=True):
    """An engine model with its provenance.

    ``engine_model`` was fitted at ``degree``, the GPUs or cores of a replica of ``shape``; at others it has
    the all-reduce of its ``prior``, a profile's name (empty: unknown). ``limits`` and ``hardware`` were
    reported by the replica; ``path_s`` is the network time per request. ``engine`` is kind and version,
    ``tidegate`` the version that calibrated ``at`` (ISO 8601). ``steps`` were timed. ``note`` is a caveat.
    """

    format: Literal[1]
    model: str
    shape: str
    degree: _Positive
    engine: str
    hardware: str
    tidegate: str
    at: str
    engine_model: EngineModel
    limits: BatchLimits
    max_model_len: _Positive
    path_s: _NotNegative
    error: FitErrors
    steps: Annotated[int, Meta(ge=0)]
    points: tuple[PointResult, ...]
    prior: str
    prior_model: EngineModel
    note: str = ""

    @property
    def description(self) -> str:
        return f"calibrated on {self.model}, shape {self.shape}, at {self.at}"


def model_file(raw: object, where: str) -> PerformanceModelFile:
    """Check the content of a model file at the path ``where``; raises :class:`policy.errors.ConfigError`."""
    if not isinstance(raw, Mapping):
        raise ConfigError(where, raw, "the content of a model file, as `tidegate calibrate` writes it")
    if "format" in raw and raw["format"] != FORMAT:
        raise ConfigError(f"{where}.format", raw["format"], f"{FORMAT}: the file is of another Tidegate")
    file = convert(raw, PerformanceModelFile, where)
    for key in ("o", "w", "c", "g", "r", "copy", "allreduce_a", "allreduce_b"):
        if (seconds := getattr(file.engine_model, key)) < 0.0:
            raise ConfigError(f"{where}.engine_model.{key}", seconds, "seconds, 0 or more")
    for key in ("max_num_batched_tokens", "max_num_seqs", "kv_tokens"):
        if (count := getattr(file.limits, key)) < 1:
            raise ConfigError(f"{where}.limits.{key}", count, "1 or more")
    return file


def encode(file: PerformanceModelFile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def describe(given: str | Mapping[str, Any] | None) -> str | None:
    """A profile for display: its name, or the description of a model file."""
    if given is None or isinstance(given, str):
        return given
    return model_file(given, "profile").description
