"""Grammars that no engine survives are told by their length and by what they open."""

from __future__ import annotations

import json

import pytest

from policy.engine.grammar_bounds import MAX_OPENINGS, MAX_PATTERN, grammar_excess, pattern_excess

DEEP = "(" * 30_000 + "a" + ")" * 30_000
OPENINGS = "a grammar here must have at most 8192 opening parentheses and brackets, this one has 30000"
LITERAL = "a pattern here must have at most 4096 characters, this one has 4097"


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("start: %json " + json.dumps({"type": "string", "pattern": DEEP}), OPENINGS),
        ('start: %json {"pattern":"' + r"\u0028" * 30_000 + '"}', OPENINGS),
        ('start: %json {"pattern":"' + r"\u005B\u005b" * 15_000 + '"}', OPENINGS),
        (f"start: /{DEEP}/", OPENINGS),
        (f'root ::= "{")(" * 30_000}"', OPENINGS),
        ("start: " + "[" * 30_000 + '"a"' + "]" * 30_000, OPENINGS),
        ("start: /" + "a" * (MAX_PATTERN + 1) + "/", LITERAL),
        ('start: %json {"pattern":"' + "a" * (MAX_PATTERN + 1) + '"}', LITERAL),
        ('start: "' + "a" * (MAX_PATTERN + 1), LITERAL),
        ('root ::= "' + r"\"" * (MAX_PATTERN // 2) + "a", LITERAL),
        ("start: /" + "a" * MAX_PATTERN + "/", ""),
        ("start: " + '"a" | ' * MAX_PATTERN + '"b"', ""),
        ("start: a // b\n" * 10_000, ""),
        ('root ::= "' + "(" * MAX_PATTERN + '"', ""),
        ("root ::= [a-z]\n" * MAX_OPENINGS, ""),
    ],
)
def test_a_grammar_opens_little_and_has_short_patterns(grammar: str, why: str) -> None:
    assert grammar_excess(grammar, "here") == why


def test_a_pattern_is_short() -> None:
    assert pattern_excess("a" * MAX_PATTERN, "here") == ""
    assert pattern_excess("a" * (MAX_PATTERN + 1), "here") == LITERAL
