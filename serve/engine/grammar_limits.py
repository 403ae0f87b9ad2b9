"""Limits on the grammars of structured outputs, which xgrammar compiles in the engine's own processes.

It parses the patterns of a schema by recursion without a limit: 30,000 nested parentheses end the process
with a segmentation fault. The time to compile a schema grows with the square of its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

MAX_BYTES = 256 * 1024
MAX_PATTERN = 4096

_SOURCES = "response_format, structured_outputs, or the parameters of a tool that must be called"


class StructuredOutputs(Protocol):
    """The fields of vLLM's ``StructuredOutputsParams`` that hold a grammar."""

    json: str | dict[str, Any] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    structural_tag: str | None


def excess(wanted: StructuredOutputs) -> str | None:
    """Why the grammar of ``wanted`` is refused, or ``None`` if it is within the limits."""
    given = wanted.json or wanted.choice or wanted.grammar or wanted.structural_tag or ""
    text = given.encode() if isinstance(given, str) else msgspec.json.encode(given)
    if len(text) > MAX_BYTES:
        return f"a grammar ({_SOURCES}) must have at most {MAX_BYTES} bytes, this one has {len(text)}"
    longest = max((len(pattern) for pattern in _patterns(wanted, len(text))), default=0)
    if longest > MAX_PATTERN:
        return f"a pattern ({_SOURCES}) must have at most {MAX_PATTERN} characters, this one has {longest}"
    return None


def _patterns(wanted: StructuredOutputs, size: int) -> Iterator[str]:
    """The regular expressions of ``wanted``; those of a schema or tag are its strings under some names."""
    if wanted.regex is not None:
        yield wanted.regex
    schema = wanted.json or wanted.structural_tag
    if size > MAX_PATTERN and schema:
        yield from _in(_decoded(schema) if isinstance(schema, str) else schema)


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None  # vLLM refuses it


def _in(schema: Any) -> Iterator[str]:
    level = [schema]
    while level:
        node = level.pop()
        if isinstance(node, dict):
            level += node.values()
            if isinstance(pattern := node.get("pattern"), str):
                yield pattern
            if isinstance(patterns := node.get("patternProperties"), dict):
                yield from patterns
        elif isinstance(node, list):
            level += node
