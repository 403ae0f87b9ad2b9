"""Scenarios of a simulation, read from YAML: its time of day, start-up times, crashes and slowdowns."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from policy.config.control import Section
from policy.config.convert import convert
from policy.errors import ConfigError
from store.yaml_file import read_yaml

_Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class CrashFault(Section, frozen=True):
    """The longest-serving replica crashes ``at`` this second of the run."""

    at: _Seconds
    model: str = ""


class SlowdownFault(Section, frozen=True):
    """The steps of the longest-serving replica take ``factor`` times as long ``at`` .. ``until``.

    Factors of overlapping slowdowns multiply.
    """

    at: _Seconds
    until: _Seconds
    factor: Annotated[float, Meta(gt=0, le=1000)]
    model: str = ""


class FaultScenario(Section, frozen=True):
    """Start-up times (seconds from start to ready) by path, and faults.

    The trace begins at ``starts_at``, which scaling schedules follow: a Monday at midnight by default.
    ``None`` is the model's ``assumed_start_s`` (a wake: a tenth of it). The first start of a shape is a cold
    one, later ones find the weights cached. ``spread`` is the standard deviation of a start as a part of its
    mean. ``adapter_load_s`` holds up the steps of a replica.
    """

    starts_at: Annotated[datetime, Meta(tz=True)] = datetime(2024, 1, 1, tzinfo=UTC)
    cold_s: _Seconds | None = None
    cached_s: _Seconds | None = None
    sleeping_s: _Seconds | None = None
    spread: Annotated[float, Meta(ge=0, le=1)] = 0.0
    adapter_load_s: _Seconds = 0.05
    crashes: tuple[CrashFault, ...] = ()
    slow: tuple[SlowdownFault, ...] = ()


NO_FAULTS: FaultScenario = msgspec.convert({}, FaultScenario)


def scenario_of(path: Path, models: Collection[str]) -> FaultScenario:
    """The scenario in the file at ``path``, for a deployment of these ``models``.

    Raises :class:`policy.errors.ConfigError`, which names the file and the place in it.
    """
    raw = read_yaml(path, "cold_s")
    try:
        scenario = convert(raw, FaultScenario, "")
        named = [(f"crashes[{i}]", crash.model) for i, crash in enumerate(scenario.crashes)]
        named += [(f"slow[{i}]", slow.model) for i, slow in enumerate(scenario.slow)]
        for place, model in named:
            if model and model not in models:
                raise ConfigError(f"{place}.model", model, f"one of: {', '.join(models)}")
        for i, slow in enumerate(scenario.slow):
            if slow.until <= slow.at:
                raise ConfigError(f"slow[{i}].until", slow.until, f"an instant after {slow.at:g}, its 'at'")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.path}", error.value, error.expected) from None
    return scenario
