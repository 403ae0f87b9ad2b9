"""The size of a regular expression with its repetitions written out, as grammar compilers do."""

from __future__ import annotations

from typing import Final

# No need to count further.
_MANY: Final = 1 << 40
_MAX_DIGITS: Final = 9
# Of a repetition's text; a longer one has more than nine digits.
_MAX_TIMES: Final = 64
_KIND_ENDS: Final = ":=!>)"


def expanded_size(pattern: str) -> int:
    """The characters and classes of ``pattern``, a valid one, with every ``{m,n}`` written out."""
    outer: list[int] = []  # the size so far of each open group's surroundings
    size = last = at = 0
    end = len(pattern)
    while at < end:
        char = pattern[at]
        at += 1
        if char == "(":
            outer.append(size)
            size = last = 0
            if pattern.startswith("?", at):  # what kind of group it is
                while at < end and pattern[at] not in _KIND_ENDS:
                    at += 1
                at += 1
            continue
        if char == ")":
            last = max(size, 1)
            size = last + (outer.pop() if outer else 0)
            continue
        if char == "{" and last:
            close = pattern.find("}", at, at + _MAX_TIMES)
            close = at + _MAX_TIMES if close < 0 else close
            times = _times(pattern[at:close]) if close < end else -1
            if times >= 0:
                size = min(size + last * max(times - 1, 0), _MANY)
                last = min(last * max(times, 1), _MANY)
                at = close + 1
                continue
        if char in "*+?|":
            continue
        if char == "\\":
            at += 1
        elif char == "[":
            at = _class_end(pattern, at)
        last = 1
        size = min(size + 1, _MANY)
    return min(size + sum(outer), _MANY)


def _times(text: str) -> int:
    """The most repetitions that ``m``, ``m,`` or ``m,n`` asks for; -1 if it is none of these."""
    most = 0
    for part in text.split(",", 1):
        digits = part.strip()
        if digits and not (digits.isascii() and digits.isdigit()):
            return -1
        most = max(most, _MANY if len(digits) > _MAX_DIGITS else int(digits or 0))
    return most


def _class_end(pattern: str, at: int) -> int:
    """Behind the bracket that closes the class which is open at ``at``."""
    if pattern.startswith("^", at):
        at += 1
    if pattern.startswith("]", at):
        at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1
