"""Strict YAML reading; errors name the line."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from policy.errors import ConfigError

# What a file is, by the key at its top.
_KINDS = {"models": "a deployment file", "mix": "a workload or a trace"}


class _Loader(yaml.SafeLoader):
    """The safe loader, but duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key!r} is written twice", problem_mark=key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, key: str) -> dict[str, Any]:
    """The mapping in the YAML (or JSON) file at ``path``, which has ``key`` at its top.

    Values are limited to those of JSON. Raises :class:`policy.errors.ConfigError` for files that cannot be
    read, invalid UTF-8 or YAML, anything but a mapping, files of another kind, and numbers that are not
    finite. Whether the key is present is checked later.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), error.strerror, "a file that can be read") from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"byte {error.start}", "UTF-8 text") from None
    decoded = _decode(path, text)
    if not isinstance(decoded, Mapping):
        raise ConfigError(str(path), decoded, f"a mapping with the key {key!r}")
    if key not in decoded and (other := next((each for each in _KINDS if each in decoded), None)):
        raise ConfigError(str(path), _KINDS[other], _KINDS.get(key, f"a mapping with the key {key!r}"))
    try:
        carried = msgspec.json.decode(msgspec.json.encode(decoded), type=dict[str, Any])
        # JSON would encode them as null.
        _check_finite(path, decoded, "")
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(
            str(path), None, f"mappings with text keys, lists, text, numbers ({error})"
        ) from None
    return carried


def _check_finite(path: Path, value: object, place: str) -> None:
    """Refuse numbers that are not finite in ``value``, at ``place`` of the file."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {place}", value, "a finite number")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_finite(path, inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _check_finite(path, inner, f"{place}[{i}]")


def _decode(path: Path, text: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        line = text.splitlines()[mark.line].strip() if mark and mark.line < len(text.splitlines()) else ""
        raise ConfigError(where, line, f"valid YAML ({error.problem})") from None
    except yaml.YAMLError as error:
        raise ConfigError(str(path), None, f"valid YAML ({error})") from None
    except RecursionError:
        raise ConfigError(str(path), None, "valid YAML with fewer levels") from None
    except (ValueError, LookupError, AttributeError) as error:  # SafeLoader converts what it has not checked
        raise ConfigError(str(path), None, f"valid YAML ({error})") from None
