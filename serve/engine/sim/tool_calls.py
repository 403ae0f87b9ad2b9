"""Calls of tools: whether an answer is one, and arguments that fit the tool's schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from serve.engine.sim.http_exchange import ApiError
from serve.engine.sim.pseudo_tokenizer import mix, words

_DEPTH = 8


class FunctionDefinition(msgspec.Struct, frozen=True):
    """A function: its name, and the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool of a chat."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class ToolSet:
    """The functions that an answer may call.

    ``choice`` is ``auto``, ``required``, ``none`` or the name of one. With ``auto`` half of the answers are
    calls, by their seeds: an agent's loop has two turns on average. Raises a 400 for an invalid choice.
    """

    def __init__(self, functions: list[FunctionDefinition], choice: str) -> None:
        self._functions = functions
        self._choice = choice
        if choice in ("auto", "required", "none"):
            return
        self._functions = [function for function in functions if function.name == choice]
        if not self._functions:
            raise ApiError(
                400,
                "The tool specified in `tool_choice` does not match any of the specified `tools`",
                "tool_choice",
            )

    def call(self, seed: int) -> tuple[str, str] | None:
        """The name and the arguments (JSON) of the call that an answer with this seed is, if it is one."""
        if not self._functions or self._choice == "none" or (self._choice == "auto" and mix(seed) % 2):
            return None
        function = self._functions[seed % len(self._functions)]
        return function.name, json.dumps(instance(function.parameters or {}, seed))


def tools_of(tools: list[Tool] | None, choice: str | dict[str, Any] | None) -> ToolSet:
    """The tools of a chat and its ``tool_choice``; raises a 400 as vLLM does."""
    if tools == []:
        raise ApiError(400, "`tools` must not be an empty array.", "tools")
    if tools is None and choice not in (None, "none"):
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", "tool_choice")
    wanted = choice if choice is not None else "auto"
    if isinstance(wanted, dict):
        if wanted.get("type", "function") != "function":
            raise ApiError(400, "Invalid value for `tool_choice`: it must be a function", "tool_choice")
        function = wanted.get("function")
        wanted = function.get("name", "") if isinstance(function, dict) else ""
    elif wanted not in ("auto", "required", "none"):
        raise ApiError(400, f"Invalid value for `tool_choice`: {wanted}!", "tool_choice")
    return ToolSet([tool.function for tool in tools or ()], wanted)


def instance(
    schema: Mapping[str, Any], seed: int, root: Mapping[str, Any] | None = None, depth: int = 0
) -> Any:
    """A value that fits ``schema`` where it uses only the common keywords; seeds give different ones.

    References lead into ``root``, or else into ``schema``. Deep in a value the optional ones are not
    followed: recursive models end.
    """
    root = schema if root is None else root
    seed = mix(seed + depth + 1)
    if depth < _DEPTH and isinstance(reference := schema.get("$ref"), str):
        return instance(_target(reference, root), seed, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    deep = depth >= _DEPTH // 2
    for name in ("enum", "anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            if deep and name != "enum":
                options = [each for each in options if "$ref" not in _schema(each)] or options
            option = options[seed % len(options)]
            return option if name == "enum" else instance(_schema(option), seed, root, depth)
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        kind = kind[0] if kind else "null"
    if kind == "object" and depth < _DEPTH:
        properties = schema.get("properties")
        fields = properties.items() if isinstance(properties, dict) else ()
        return {
            key: instance(_schema(value), seed + index, root, depth + 1)
            for index, (key, value) in enumerate(fields)
        }
    if kind == "array":
        items = _schema(schema.get("items"))
        if depth >= _DEPTH or (deep and "$ref" in items):
            return []
        return [instance(items, seed, root, depth + 1)]
    match kind:
        case "integer":
            return _integer(schema, seed)
        case "number":
            return _number(schema, seed)
        case "string":
            return words(seed, 3)
        case "boolean":
            return seed % 2 == 0
        case "object":
            return {}
    return None


def _integer(schema: Mapping[str, Any], seed: int) -> int:
    above = [math.floor(bound) + 1 for bound in _bounds(schema, "exclusiveMinimum")]
    below = [math.ceil(bound) - 1 for bound in _bounds(schema, "exclusiveMaximum")]
    above += [math.ceil(bound) for bound in _bounds(schema, "minimum")]
    below += [math.floor(bound) for bound in _bounds(schema, "maximum")]
    least = max(above, default=min([0, *below]))
    most = min(below, default=least + 9)
    return least + seed % max(1, most - least + 1)


def _number(schema: Mapping[str, Any], seed: int) -> float:
    below = _bounds(schema, "maximum", "exclusiveMaximum")
    least = max(
        _bounds(schema, "minimum", "exclusiveMinimum"), default=min([0.0, *(bound - 1 for bound in below)])
    )
    most = min(below, default=least + 9)
    return least + (most - least) * (1 + seed % 99) / 100  # within exclusive bounds, too


def _bounds(schema: Mapping[str, Any], *names: str) -> list[float]:
    """Those of the bounds ``names`` that are numbers: in old drafts an exclusive bound is a flag."""
    given = (schema.get(name) for name in names)
    return [value for value in given if isinstance(value, int | float) and not isinstance(value, bool)]


def _target(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference such as ``#/$defs/City`` leads to; a string's if it leads nowhere."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return _schema(found)


def _schema(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {"type": "string"}
