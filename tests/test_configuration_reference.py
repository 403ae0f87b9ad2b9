"""docs/configuration.md lists every key with type, range and default as the structures have them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from policy.config.deployment import Deployment
from policy.scaling.policies.registry import BUILTIN

PAGE = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
# The heading of the top-level keys.
ROOT = "Top level"
CONTROL = "models[].control"
_HEADING = re.compile(r"^#+ `?([^`\n]+)`?$", re.MULTILINE)
_ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.+) \|$", re.MULTILINE)
_UNITS = {"_s": "seconds", "_bytes": "bytes"}


def sections(kind: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, inspect.StructType]]:
    """Every section by its path, in the order of the structures."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    yield path or ROOT, info
    for field in info.fields:
        yield from _inner(field.type, f"{path}.{field.encode_name}".lstrip("."))


def _inner(info: inspect.Type, path: str) -> Iterator[tuple[str, inspect.StructType]]:
    if isinstance(info, inspect.Metadata):
        yield from _inner(info.type, path)
    elif isinstance(info, inspect.UnionType):
        for member in info.types:
            yield from _inner(member, path)
    elif isinstance(info, inspect.VarTupleType):
        yield from _inner(info.item_type, f"{path}[]")
    elif isinstance(info, inspect.DictType):
        yield from _inner(info.value_type, f"{path}.NAME")
    elif isinstance(info, inspect.StructType):
        yield from sections(info.cls, path)


def kind_of(info: inspect.Type, key: str) -> str:
    """The type and range of ``key``, in words."""
    if isinstance(info, inspect.Metadata):
        return kind_of(info.type, key)
    if isinstance(info, inspect.UnionType):
        return " or ".join(kind_of(member, key) for member in info.types)
    if isinstance(info, inspect.IntType | inspect.FloatType):
        unit = next((unit for end, unit in _UNITS.items() if key.endswith(end)), "")
        what = unit or ("integer" if isinstance(info, inspect.IntType) else "number")
        return f"{what}{_bounds(info)}"
    if isinstance(info, inspect.LiteralType):
        return " or ".join(f"`{value}`" for value in info.values)
    if isinstance(info, inspect.EnumType):
        return " or ".join(f"`{member.value}`" for member in info.cls if isinstance(member, Enum))
    if isinstance(info, inspect.VarTupleType):
        return f"list of {_plural(kind_of(info.item_type, key))}"
    if isinstance(info, inspect.DictType):
        any_value = isinstance(info.value_type, inspect.AnyType)
        return "mapping" if any_value else f"mapping of {_plural(kind_of(info.value_type, key))}"
    names: dict[type[inspect.Type], str] = {
        inspect.StrType: "string",
        inspect.BoolType: "boolean",
        inspect.NoneType: "null",
        inspect.StructType: "section",
    }
    return names[type(info)]


def _plural(kind: str) -> str:
    return f"{kind}s" if kind in ("section", "string") else kind


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    bounds = [
        f"{sign} {int(bound) if bound == int(bound) else bound}"
        for sign, bound in ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))
        if bound is not None
    ]
    return "".join(f", {bound}" for bound in bounds)


def default_of(field: inspect.Field, path: str) -> str:
    """The default of ``field``, a key of the section at ``path``, in words."""
    if field.required:
        return "required"
    value: Any = field.default
    if value is inspect.NODEFAULT:
        value = field.default_factory()
    if isinstance(value, msgspec.Struct):
        return f"see `{field.encode_name if path == ROOT else f'{path}.{field.encode_name}'}`"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if value in ("", (), {}):
        return "none"
    if value is None or isinstance(value, bool):
        return {None: "null", False: "false", True: "true"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def every_section() -> Iterator[tuple[str, inspect.StructType]]:
    """The sections of the deployment, and after ``control`` the parameters of each policy."""
    for path, info in sections(Deployment):
        yield path, info
        if path == CONTROL:
            for name, kind in BUILTIN.items():
                yield from sections(kind, f"{CONTROL}.policy.{name}")


def own_first(info: inspect.StructType) -> list[inspect.Field]:
    """The fields of a section, those of its base after its own."""
    return sorted(info.fields, key=lambda field: field.name not in info.cls.__annotations__)


EXPECTED = {
    path: [(f.encode_name, kind_of(f.type, f.encode_name), default_of(f, path)) for f in own_first(info)]
    for path, info in every_section()
}


def written() -> dict[str, list[tuple[str, str, str]]]:
    """The page's tables by heading."""
    parts = _HEADING.split(PAGE)[1:]
    tables = dict(zip(parts[::2], parts[1::2], strict=True))
    return {
        heading: [(key, kind, default) for key, kind, default, _ in _ROW.findall(text)]
        for heading, text in tables.items()
        if _ROW.search(text)
    }


def test_the_page_has_a_table_for_every_section_and_no_other() -> None:
    assert sorted(written()) == sorted(EXPECTED)


@pytest.mark.parametrize("path", EXPECTED)
def test_a_table_agrees_with_the_structure(path: str) -> None:
    assert written()[path] == EXPECTED[path]


def test_every_key_is_described() -> None:
    for key, _, _, text in _ROW.findall(PAGE):
        assert len(text.split()) >= 2, key
