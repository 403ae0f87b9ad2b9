"""Grammars of structured outputs, which xgrammar compiles in the engine's processes: limits and failures.

How deep and long it can be is in :mod:`policy.engine.grammar_bounds`. The time to compile a schema grows with
the square of its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from policy.engine.grammar_bounds import MAX_PATTERN, grammar_excess, pattern_excess

MAX_BYTES = 256 * 1024

_SOURCES = "(response_format, structured_outputs, or the parameters of a tool that must be called)"


class StructuredOutputs(Protocol):
    """The fields of vLLM's ``StructuredOutputsParams`` that hold a grammar."""

    json: str | dict[str, Any] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    structural_tag: str | None


class FailedOutput(Protocol):
    """The fields of vLLM's ``RequestOutput``; ``metrics`` is none with ``disable_log_stats``."""

    outputs: list[Any]
    metrics: Any


def excess(wanted: StructuredOutputs) -> str | None:
    """Why the grammar of ``wanted`` is refused, or ``None`` if it is within the limits."""
    given = wanted.json or wanted.choice or wanted.grammar or wanted.structural_tag or ""
    text = given.encode() if isinstance(given, str) else msgspec.json.encode(given)
    if len(text) > MAX_BYTES:
        return f"a grammar {_SOURCES} must have at most {MAX_BYTES} bytes, this one has {len(text)}"
    if wanted.regex is not None and (found := pattern_excess(wanted.regex, _SOURCES)):
        return found
    if wanted.grammar is not None and (found := grammar_excess(wanted.grammar, _SOURCES)):
        return found
    schema = wanted.json or wanted.structural_tag
    if len(text) <= MAX_PATTERN:
        return None
    inside = _in(_decoded(schema) if isinstance(schema, str) else schema)
    return next((found for found in inside if found), None)


def is_grammar_failure(output: FailedOutput, *, loads: bool) -> bool | None:
    """Whether a grammar is why vLLM ended its request with an error; ``None`` if ``output`` does not show it.

    vLLM names no cause (``v1/core/sched/scheduler.py``, 0.32). A grammar ends a request by a token that it
    does not allow, or before the first step because it cannot be compiled. A request that was never queued
    failed before that, and one that was scheduled without a token failed in a step. With ``loads`` a failed
    load from a connector's cache ends requests too, while they wait for it: at first, or after a preemption.
    """
    stats = output.metrics
    tokens = any(each.token_ids for each in output.outputs if each.finish_reason == "error")
    if tokens or (stats is not None and stats.num_generation_tokens):
        return None if loads and (stats is None or stats.num_preemptions) else True
    if stats is not None and (not stats.queued_ts or stats.scheduled_ts):
        return False
    return None if loads else True


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None  # vLLM refuses it


def _in(schema: Any) -> Iterator[str]:
    """The excess of each regular expression and grammar of a schema or tag: its strings under some names."""
    level = [schema]
    while level:
        node = level.pop()
        if isinstance(node, dict):
            level += node.values()
            if isinstance(pattern := node.get("pattern"), str):
                yield pattern_excess(pattern, _SOURCES)
            if isinstance(grammar := node.get("grammar"), str):
                yield grammar_excess(grammar, _SOURCES)
            if isinstance(patterns := node.get("patternProperties"), dict):
                for each in patterns:
                    yield pattern_excess(each, _SOURCES)
        elif isinstance(node, list):
            level += node
