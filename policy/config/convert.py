"""Conversion of plain values into structures; errors name path, value and expectation."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from policy.errors import ConfigError

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<key>.*)`")
_ENUM = re.compile(r"Invalid enum value")
# Sections and names of values that may be secret.
_GUARDED = re.compile(r"(?:tenants|upstreams|models\[\d+\]\.urls)\b")
_SECRET = re.compile(r"key|secret|token|password", re.IGNORECASE)


def require(holds: object, path: str, value: object, expected: str) -> None:
    """Raise :class:`policy.errors.ConfigError` unless ``holds``."""
    if not holds:
        raise ConfigError(path, value, expected)


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """The ``known`` names, with a hint if one of them is like the ``given`` one."""
    close = difflib.get_close_matches(given, known, n=1)
    return ", ".join(known) + (f"; did you mean {close[0]!r}?" if close else "")


def prepare_decoders(*kinds: type[Any]) -> None:
    """Let msgspec look at types that threads decode or convert to, before there are threads.

    Otherwise it does so at the first use, and of two at once one finds half of what it needs and crashes.
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)


def convert(raw: object, kind: type[T], prefix: str) -> T:
    """``raw``, at the path ``prefix``, as a ``kind``; raises :class:`policy.errors.ConfigError`."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _located(str(error), raw, kind, prefix) from None


def _located(text: str, raw: object, kind: type[Any], prefix: str) -> ConfigError:
    match = _AT.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    before, within_mapping, _ = path.partition("[...]")
    if within_mapping:
        return _located_in_mapping(raw, kind, prefix, before)
    value = _value_at(raw, path)
    dotted = f"{prefix}{path}".lstrip(".") or "$"
    if (found := _UNKNOWN.match(what)) is not None:
        key = found["key"]
        known = _fields_at(kind, path)
        inner = value.get(key) if isinstance(value, Mapping) else value
        where = f"{dotted}.{key}" if dotted != "$" else key
        return ConfigError(where, display(where, inner), f"one of the keys: {did_you_mean(key, known)}")
    if (found := _MISSING.match(what)) is not None:
        where = f"{dotted}.{found['key']}" if dotted != "$" else found["key"]
        return ConfigError(where, None, "a value: this key is required")
    if _ENUM.match(what):
        return ConfigError(dotted, value, f"one of: {', '.join(_members_at(kind, path))}")
    expected = re.sub(r"^Expected ", "", what)
    return ConfigError(dotted, display(dotted, value), re.sub(r", got .*$", "", expected).replace("`", ""))


def _located_in_mapping(raw: object, kind: type[Any], prefix: str, path: str) -> ConfigError:
    """The error of the first invalid value of the mapping at ``path``, whose key msgspec does not name."""
    info = _type_at(kind, path)
    value_kind = getattr(info.value_type, "cls", str) if isinstance(info, inspect.DictType) else str
    for key, value in _value_at(raw, path).items():
        where = f"{prefix}{path}.{key}"
        try:
            msgspec.convert(value, value_kind)
        except msgspec.ValidationError as error:
            return _located(str(error), value, value_kind, where.lstrip("."))
    return ConfigError(f"{prefix}{path}".lstrip("."), _value_at(raw, path), "valid values")


def _steps(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def _value_at(raw: Any, path: str) -> Any:
    for step in _steps(path):
        if isinstance(raw, Mapping):
            raw = raw.get(step)
        elif isinstance(raw, list) and step.isdigit():
            raw = raw[int(step)]
    return raw


def _type_at(kind: Any, path: str) -> inspect.Type:
    """The declared type at ``path``; of a union, its struct or list."""
    info = _plain(inspect.type_info(kind))
    for step in _steps(path):
        if step.isdigit() and isinstance(info, inspect.VarTupleType):
            info = _plain(info.item_type)
        elif isinstance(info, inspect.StructType):
            info = _plain(next(field.type for field in info.fields if field.encode_name == step))
    return info


def _plain(info: inspect.Type) -> inspect.Type:
    if isinstance(info, inspect.Metadata):
        return _plain(info.type)
    if isinstance(info, inspect.UnionType):
        known = inspect.StructType | inspect.VarTupleType
        return next((member for member in info.types if isinstance(member, known)), info)
    return info


def _fields_at(kind: Any, path: str) -> list[str]:
    info = _type_at(kind, path)
    return [field.encode_name for field in info.fields] if isinstance(info, inspect.StructType) else []


def _members_at(kind: Any, path: str) -> list[str]:
    info = _type_at(kind, path)
    return [str(member) for member in info.cls] if isinstance(info, inspect.EnumType) else []


def display(path: str, value: object) -> object:
    """``value`` for an error message, with anything that may be a secret masked."""
    if value is None or _GUARDED.match(path) is None:
        return value
    if isinstance(value, Mapping | list) or _SECRET.search(path) is not None or path.endswith("]"):
        return "***"
    return value
