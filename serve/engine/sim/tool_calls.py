"""Calls of tools: whether an answer is one, and arguments that fit the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from serve.engine.sim.http_exchange import ApiError
from serve.engine.sim.text import mix, words

_DEPTH = 8


class Definition(msgspec.Struct, frozen=True):
    """A function: its name, and the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool of a chat."""

    function: Definition
    type: Literal["function"] = "function"


class Tools:
    """The functions that an answer may call.

    ``choice`` is ``auto``, ``required``, ``none`` or the name of one. With ``auto`` half of the answers are
    calls, by their seeds: an agent's loop has two turns on average. Raises a 400 for an invalid choice.
    """

    def __init__(self, functions: list[Definition], choice: str) -> None:
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


def tools_of(tools: list[Tool] | None, choice: str | dict[str, Any] | None) -> Tools:
    """The tools of a chat and its ``tool_choice``; raises a 400 as vLLM does."""
    if tools == []:
        raise ApiError(400, "`tools` must not be an empty array.", "tools")
    if tools is None and choice not in (None, "none"):
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", "tool_choice")
    wanted = choice if choice is not None else "auto"
    if isinstance(wanted, dict):
        function = wanted.get("function")
        wanted = function.get("name", "") if isinstance(function, dict) else ""
    elif wanted not in ("auto", "required", "none"):
        raise ApiError(400, f"Invalid value for `tool_choice`: {wanted}!", "tool_choice")
    return Tools([tool.function for tool in tools or ()], wanted)


def instance(schema: Mapping[str, Any], seed: int, depth: int = 0) -> Any:
    """A value that fits ``schema`` where it uses only the common keywords; seeds give different ones."""
    seed = mix(seed + depth + 1)
    if "const" in schema:
        return schema["const"]
    for name in ("enum", "anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            option = options[seed % len(options)]
            return option if name == "enum" else instance(_schema(option), seed, depth)
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        kind = kind[0] if kind else "null"
    if kind == "object" and depth < _DEPTH:
        properties = schema.get("properties")
        items = properties.items() if isinstance(properties, dict) else ()
        return {
            key: instance(_schema(value), seed + index, depth + 1) for index, (key, value) in enumerate(items)
        }
    if kind == "array" and depth < _DEPTH:
        return [instance(_schema(schema.get("items")), seed, depth + 1)]
    least = schema.get("minimum", 0)
    numbers = {"integer": int(least) + seed % 10, "number": least + seed % 100 / 10}
    others: dict[str, Any] = {"string": words(seed, 3), "boolean": seed % 2 == 0, "object": {}, "array": []}
    return {**numbers, **others}.get(kind) if isinstance(kind, str) else None


def _schema(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {"type": "string"}
