"""Checks of a model's section ``adapters`` beyond its types."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from policy.config.convert import convert_values
from policy.config.deployment import ENTRY_NAME, AdapterSource, AdapterVersion, ModelSpec
from policy.errors import ConfigError
from policy.types import EngineKind
from policy.wire.catalog import NAME

_HUB = re.compile(r"hf:[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?")
# What the section says in their place.
_OWNED = frozenset({"enable_lora", "max_loras", "max_lora_rank"})
_SOURCE = "a path, http(s)://, hf:ORG/NAME[@REVISION], s3:// or another URL of fsspec's"


def convert_versions(model: Mapping[str, Any], prefix: str) -> None:
    """Check each version in the raw ``model`` at the path ``prefix`` separately, so that errors name it.

    Raises :class:`policy.errors.ConfigError`.
    """
    section = model.get("adapters")
    sources = section.get("sources") if isinstance(section, Mapping) else None
    for i, source in enumerate(sources if isinstance(sources, list) else []):
        if isinstance(source, Mapping):
            convert_values(source, "versions", AdapterVersion, f"{prefix}.adapters.sources[{i}]")


def check_adapters(path: str, spec: ModelSpec, models: Collection[str], tenants: Collection[str]) -> None:
    """Check the section of the model at ``path``, given the file's ``models`` and ``tenants``.

    Raises :class:`policy.errors.ConfigError`.
    """
    if spec.adapters is None:
        return
    given = {f"{path}.engine_args": spec.engine_args}
    given |= {f"{path}.shapes.{name}.engine_args": shape.engine_args for name, shape in spec.shapes.items()}
    for at, args in given.items():
        for key in sorted(_OWNED & args.keys()):
            raise ConfigError(f"{at}.{key}", args[key], "nothing: the model's section `adapters` says it")
    sources = spec.adapters.sources
    if sources and spec.engine is EngineKind.EXTERNAL:
        names = [source.name for source in sources]
        raise ConfigError(
            f"{path}.adapters.sources", names, "nothing: Tidegate does not load them into an external engine"
        )
    seen: set[str] = set()
    for i, source in enumerate(sources):
        at = f"{path}.adapters.sources[{i}]"
        if NAME.fullmatch(source.name) is None:
            raise ConfigError(f"{at}.name", source.name, f"a name that matches {NAME.pattern}")
        if source.name in seen or source.name in models:
            raise ConfigError(
                f"{at}.name", source.name, "a name that no other adapter of it and no model has"
            )
        seen.add(source.name)
        _check_content(at, source)
        for j, tenant in enumerate(source.tenants):
            if tenant not in tenants:
                known = ", ".join(sorted(tenants)) or "none are in the document"
                raise ConfigError(f"{at}.tenants[{j}]", tenant, f"one of the tenants: {known}")


def _check_content(at: str, source: AdapterSource) -> None:
    given = [key for key in ("path", "source", "versions") if getattr(source, key)]
    if len(given) != 1:
        expected = "exactly one of path, source and versions"
        raise ConfigError(at, ", ".join(given) or None, expected)
    if "://" in source.path or source.path.startswith("hf:"):
        raise ConfigError(f"{at}.path", source.path, "a path; a URL is written as source")
    if source.source:
        _check_source(f"{at}.source", source.source)
    places: dict[str, str] = {}
    for name, version in source.versions.items():
        if ENTRY_NAME.fullmatch(name) is None:
            raise ConfigError(f"{at}.versions.{name}", name, f"a name that matches {ENTRY_NAME.pattern}")
        _check_source(f"{at}.versions.{name}.source", version.source)
        if version.source in places:
            taken = f"a source that no other version has ({places[version.source]} has it)"
            raise ConfigError(f"{at}.versions.{name}.source", version.source, taken)
        places[version.source] = name
    if source.versions and not any(version.weight for version in source.versions.values()):
        raise ConfigError(f"{at}.versions", list(source.versions), "a weight above 0 of at least one")


def _check_source(path: str, source: str) -> None:
    hub = source.startswith("hf:")
    if (
        not source
        or not source.isprintable()
        or source.startswith("package:")
        or (hub and not _HUB.fullmatch(source))
    ):
        raise ConfigError(path, source, _SOURCE)
