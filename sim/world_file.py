"""A world as people write it: a YAML file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from policy.conversion import convert
from policy.errors import ConfigError
from sim.world import World
from store.documents import read_yaml


def world_of(path: Path, models: Collection[str]) -> World:
    """The world in the file at ``path``, for a deployment of these ``models``.

    Raises :class:`policy.errors.ConfigError`, which names the file and the place in it.
    """
    raw = read_yaml(path, "cold_s")
    try:
        world = convert(raw, World, "")
        named = [(f"crashes[{i}]", crash.model) for i, crash in enumerate(world.crashes)]
        named += [(f"slow[{i}]", slow.model) for i, slow in enumerate(world.slow)]
        for place, model in named:
            if model and model not in models:
                raise ConfigError(f"{place}.model", model, f"one of: {', '.join(models)}")
        for i, slow in enumerate(world.slow):
            if slow.until <= slow.at:
                raise ConfigError(f"slow[{i}].until", slow.until, f"an instant after {slow.at:g}, its 'at'")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.path}", error.value, error.expected) from None
    return world
