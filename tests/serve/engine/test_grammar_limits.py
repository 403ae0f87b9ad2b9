"""Grammars that xgrammar does not survive are refused before they reach it."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from policy.engine.grammar_bounds import MAX_PATTERN
from serve.engine.grammar_limits import MAX_BYTES, excess, is_grammar_failure

DEEP = "(" * 30_000 + ")" * 30_000
PATTERN = "a pattern .* at most 4096 characters, this one has 60000"
OPENINGS = "a grammar .* at most 8192 opening parentheses and brackets, this one has 30000"
LARK = "start: %json " + json.dumps({"type": "string", "pattern": DEEP})
SIZE = "a grammar .* at most 262144 bytes"


def wanted(**given: Any) -> Any:
    fields = ("json", "regex", "choice", "grammar", "structural_tag")
    return SimpleNamespace(**{name: given.get(name) for name in fields})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"regex": DEEP}, PATTERN),
        ({"json": {"type": "string", "pattern": DEEP}}, PATTERN),
        ({"json": json.dumps({"anyOf": [{"items": {"pattern": DEEP}}]})}, PATTERN),
        ({"json": {"patternProperties": {DEEP: {}}}}, PATTERN),
        ({"structural_tag": json.dumps({"format": {"type": "regex", "pattern": DEEP}})}, PATTERN),
        ({"grammar": LARK}, OPENINGS),
        ({"structural_tag": json.dumps({"format": {"type": "grammar", "grammar": LARK}})}, OPENINGS),
        ({"json": {"enum": ["x" * MAX_BYTES]}}, SIZE),
        ({"choice": ["x" * MAX_BYTES]}, SIZE),
        ({"grammar": "x" * (MAX_BYTES + 1)}, SIZE),
        ({"regex": "a" * MAX_PATTERN}, None),
        ({"grammar": "x" * MAX_BYTES}, None),
        ({"json": {"type": "object", "properties": {"pattern": {"type": "string"}}, "enum": [DEEP]}}, None),
        ({"json": "[" * 10_000}, None),
    ],
)
def test_the_size_of_grammars_and_patterns_is_bounded(given: dict[str, Any], why: str | None) -> None:
    found = excess(wanted(**given))
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(why, found)


QUEUED, SCHEDULED = {"queued_ts": 1.0}, {"queued_ts": 1.0, "scheduled_ts": 2.0}
ANSWERED = {**SCHEDULED, "num_generation_tokens": 3}


@pytest.mark.parametrize(
    ("stats", "blamed", "blamed_if_loads"),
    [
        (QUEUED, True, None),  # it cannot be compiled, or its cache could not be loaded
        (ANSWERED, True, True),  # it does not allow the last token
        ({**ANSWERED, "num_preemptions": 1}, True, None),
        ({}, False, False),  # the engine core could not read the request
        (SCHEDULED, False, False),
    ],
)
def test_a_grammar_is_to_blame_for_what_only_it_can_have_ended(
    stats: dict[str, Any], blamed: bool, blamed_if_loads: bool | None
) -> None:
    none = {"queued_ts": 0.0, "scheduled_ts": 0.0, "num_generation_tokens": 0, "num_preemptions": 0}
    failed = SimpleNamespace(finish_reason="error", token_ids=[])
    output: Any = SimpleNamespace(outputs=[failed], metrics=SimpleNamespace(**{**none, **stats}))
    assert is_grammar_failure(output, loads=False) is blamed
    assert is_grammar_failure(output, loads=True) is blamed_if_loads


@pytest.mark.parametrize("token_ids", [[], [7]])
def test_without_statistics_a_failed_load_is_not_told_from_a_grammar(token_ids: list[int]) -> None:
    failed = SimpleNamespace(finish_reason="error", token_ids=token_ids)
    output: Any = SimpleNamespace(outputs=[failed], metrics=None)
    assert is_grammar_failure(output, loads=False) is True
    assert is_grammar_failure(output, loads=True) is None
