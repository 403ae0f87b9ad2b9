"""How long patterns are, and how deep grammars can nest, that an engine compiles for structured outputs.

xgrammar parses patterns by recursion without a limit, and over 20,000 levels end its process. A grammar has
one of two syntaxes (EBNF or Lark), and Lark holds schemas with patterns: what opens is counted, not read, so
a text nests no deeper than that however an engine reads it.
"""

from __future__ import annotations

import re
from typing import Final

# Characters of a pattern, or of a text in quotes or slashes within a grammar.
MAX_PATTERN: Final = 4096
# Opening parentheses and brackets of a grammar.
MAX_OPENINGS: Final = 8192

# The last three are the first two as JSON may write them.
_OPENINGS: Final = ("(", "[", r"\u0028", r"\u005b", r"\u005B")
# Up to the end of its line if nothing closes it.
_LITERAL: Final = re.compile(r'"((?:[^"\\\n]++|\\.)*+)"?|/((?:[^/\\\n]++|\\.)*+)/?')


def openings(text: str) -> int:
    """The opening parentheses and brackets of a schema or grammar, which nests no deeper."""
    return sum([text.count(opening) for opening in _OPENINGS])


def pattern_excess(pattern: str, where: str) -> str:
    """Why a regular expression that was given ``where`` is refused; empty if it is within the bounds."""
    if len(pattern) <= MAX_PATTERN:
        return ""
    return f"a pattern {where} must have at most {MAX_PATTERN} characters, this one has {len(pattern)}"


def grammar_excess(grammar: str, where: str) -> str:
    """As :func:`pattern_excess`, of a grammar in EBNF or Lark and of the patterns within it."""
    if (opened := openings(grammar)) > MAX_OPENINGS:
        return (
            f"a grammar {where} must have at most {MAX_OPENINGS} opening parentheses and brackets, "
            f"this one has {opened}"
        )
    if len(grammar) > MAX_PATTERN:
        for found in _LITERAL.finditer(grammar):
            if excess := pattern_excess(found[1] or found[2] or "", where):
                return excess
    return ""
