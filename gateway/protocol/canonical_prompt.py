"""The prompt that an engine renders from a request's body, and where its messages end.

vLLM drops Claude Code's attribution header (another value in each request) from system prompts, and no
template writes ``cache_control``, which clients move from message to message. Both are left out here, so
that equal prompts have equal bytes. They are looked for where clients put them, at the begin of a system
prompt and at the end of the last messages: a search of all of a prompt costs 0.5 us for each KiB. So a
prompt without tools takes 2 to 3 us, and 175 KB of an agent 20 us, in plain Python.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Raw

from gateway.protocol import json_decoders
from gateway.protocol.body import RequestBody
from gateway.protocol.paths import ApiDialect, ProxyRoute

# Compared for each request: machine code reads a constant faster than a member of an enumeration.
_MESSAGES: Final = ApiDialect.MESSAGES

# Constants are read faster than names of other modules, in machine code.
ABSENT: Final = json_decoders.ABSENT
# The last messages of an agent, more than those of a turn: of Anthropic's an answer and the results of its
# tools, elsewhere each result is one. All are looked for in so many bytes.
MAX_ENDS: Final = 10
MAX_ENDS_OF_MESSAGES: Final = 4
TAIL_BYTES: Final = 32 * 1024
# The user's first turn: a few messages (instructions, environment, question) of some parts each. What is
# longer is read so far; without tools it is a conversation if an answer begins that early.
MAX_FIRST_ITEMS: Final = 48
FIRST_BYTES: Final = 32 * 1024
FIRST_BYTES_WITHOUT_TOOLS: Final = 4 * 1024
HEADER_BYTES: Final = 512
# If any message is marked, the last one is, this close to its end; marks end so close before a message does.
MARKED_BYTES: Final = 1024
MARKER_BYTES: Final = 256

# As vLLM's `_strip_claude_code_billing_header` and `AnthropicServingMessages` (0.32): a text of a system
# prompt that begins so loses its first line, or all of it where it is a block of `/v1/messages`.
_HEADER: Final = b'"x-anthropic-billing-header'
_LINE: Final = re.compile(rb'(?:[^"\\]|\\[^n])*+(?:\\n)?')
_TEXT: Final = re.compile(rb'(?:[^"\\]|\\.)*+')
_IN_SYSTEM: Final = re.compile(
    rb'\[\s*\{\s*"role"\s*:\s*"system"\s*,\s*"content"\s*:\s*'
    rb'(?:\[\s*\{\s*"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*)?\Z'
)
_MARKER: Final = b'"cache_control"'
_MEMBER: Final = re.compile(rb',\s*"cache_control"\s*:\s*(?:\{[^{}]{0,128}\}|null)')

_ROLE: Final = b'{"role":'
_TYPE: Final = b'{"type":'
_SPEAKER: Final = re.compile(
    rb'\{"role": ?"(\w+)"|\{"type": ?"(\w+)"(?:, ?"id": ?(?:"[^"]{0,64}"|null))?(?:, ?"role": ?"(\w+)")?'
)
# A message of one text may be that text alone, which clients make a block to mark it.
_BLOCK: Final = re.compile(rb'\{"role": ?"user", ?"content": ?(\[\{"type": ?"text", ?"text": ?)"')
_ANSWER: Final = b'"assistant"'
_SYSTEM: Final = b'"system"'
_SYSTEM_PROMPTS: Final = ("system", "instructions")
_SPACE: Final = b" \t\r\n"
_BETWEEN: Final = b" \t\r\n,"
_OPEN: Final = ord("[")
_ESCAPE: Final = ord("\\")
MOST_SPACE: Final = 64
_CONVERSATIONS: Final = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/responses"})

Span = tuple[int, int]


class CanonicalPrompt:
    """An engine reads ``parts`` in this order.

    ``ends`` are lengths of beginnings of all parts together, ascending, at which a message ends: what the
    next request of an agent shares with this one. ``first_turn`` is what the user said before the first
    answer, from the byte ``head`` on; empty where the prompt is no conversation: without tools and answers.
    """

    # Written out, because named tuples are not compiled.
    __slots__ = ("ends", "first_turn", "head", "parts")

    def __init__(
        self,
        parts: list[memoryview],
        ends: tuple[int, ...] = (),
        head: int = 0,
        first_turn: tuple[memoryview, ...] = (),
    ) -> None:
        self.parts = parts
        self.ends = ends
        self.head = head
        self.first_turn = first_turn


def canonical_prompt(body: RequestBody, route: ProxyRoute, raw: bytes) -> CanonicalPrompt:
    """The prompt of ``body``, read from ``raw``: tools, system prompt, and the field that the route names."""
    if route.prompt is None:
        return CanonicalPrompt([memoryview(raw)])
    # Most of a body's fields are absent, and to look for a member is cheaper than to read an attribute.
    members = body.members
    has_tools = "tools" in members and body.tools is not ABSENT
    parts = [memoryview(body.tools)] if has_tools else []
    for name in _SYSTEM_PROMPTS:
        if name in members and (system := getattr(body, name)) is not ABSENT:
            view = memoryview(system)
            listed = view[0] == _OPEN
            cut = _header(bytes(view[:HEADER_BYTES]), blocks=listed and route.api is _MESSAGES)
            parts += [view] if cut is None else _kept(view, [cut])
    prompt: Raw = getattr(body, route.prompt)
    if prompt is ABSENT:
        return CanonicalPrompt(parts)
    view = memoryview(prompt)
    if route.path not in _CONVERSATIONS or view[0] != _OPEN:
        return CanonicalPrompt([*parts, view])
    begin = bytes(view[: FIRST_BYTES if has_tools else FIRST_BYTES_WITHOUT_TOOLS])
    is_conversation = has_tools or begin.find(_ANSWER) >= 0  # twice as fast as "in"
    cuts: list[Span] = []
    if route.api is _MESSAGES:
        found = _ends(view, cuts, MAX_ENDS_OF_MESSAGES)
    else:
        # Looked for first: it is shorter, and most prompts have none.
        cut = _header(begin) if begin.find(_SYSTEM, 0, HEADER_BYTES) >= 0 else None
        if cut is not None and _IN_SYSTEM.match(begin, 0, cut[0] - 1) is not None:
            cuts.append(cut)
        elif not is_conversation:
            return CanonicalPrompt([*parts, view])
        found = _ends(view, cuts, MAX_ENDS) if has_tools else []
    head = sum(map(len, parts))
    parts += _kept(view, cuts) if cuts else [view]
    ends = [head + end - _cut_before(cuts, end) for end in found]
    first, turn = _first_turn(view, begin, cuts, has_tools=has_tools) if is_conversation else (0, [])
    if not turn:
        return CanonicalPrompt(parts, tuple(ends))
    start = head + first - _cut_before(cuts, first)
    if ends and start < ends[0]:
        ends.insert(0, start)
    return CanonicalPrompt(parts, tuple(ends), start, tuple(turn))


def _header(begin: bytes, *, blocks: bool = False) -> Span | None:
    """What is dropped of the first text in ``begin`` that begins with the header; of ``blocks`` all of it.

    Both are looked for in :data:`HEADER_BYTES`.
    """
    at = begin.find(_HEADER, 0, HEADER_BYTES)
    if at < 0 or (at > 0 and begin[at - 1] == _ESCAPE):
        return None
    found = (_TEXT if blocks else _LINE).match(begin, at + 1, HEADER_BYTES)
    return None if found is None else found.span()


def _ends(view: memoryview, cuts: list[Span], most: int) -> list[int]:
    """Where the last items of the list ``view`` end; marks of the cache before these ends go to ``cuts``."""
    offset = max(1, len(view) - TAIL_BYTES)
    tail = bytes(view[offset:])
    at = end = _before(tail, len(tail), b" \t\r\n]")
    marked = tail.rfind(_MARKER, max(0, end - MARKED_BYTES), end) >= 0
    needle = _needle(bytes(view[:64]))
    found: list[int] = []
    while end > 0:
        found.append(offset + end)
        at = tail.rfind(needle, 0, at) if needle and len(found) < most else -1
        if marked and (mark := tail.rfind(_MARKER, max(0, at, end - MARKER_BYTES), end)) >= 0:
            member = _MEMBER.match(tail, _before(tail, mark, _SPACE) - 1, end)
            if member is not None:
                cuts.append((offset + member.start(), offset + member.end()))
        if at < 0:
            break
        end = _before(tail, at, _BETWEEN)
    found.reverse()
    cuts.sort()
    return found


def _needle(begin: bytes) -> bytes:
    """How the items of a list begin, as its first one does; empty if in another way."""
    begin = begin[1:64].lstrip()
    return _ROLE if begin.startswith(_ROLE) else _TYPE if begin.startswith(_TYPE) else b""


def _first_turn(
    view: memoryview, begin: bytes, cuts: list[Span], *, has_tools: bool
) -> tuple[int, list[memoryview]]:
    """Where the user's first turn in the list ``view`` begins, and what it says; nothing if there is none.

    It is looked for in ``begin``, the first bytes of ``view``.
    """
    needle = _needle(begin)
    at = begin.find(needle) if needle else -1
    start, user, end = 0, -1, -1
    for _ in range(MAX_FIRST_ITEMS):
        if at < 0:
            break
        speaker = _speaker(begin, at)
        if speaker == b"user" and user < 0:
            start, user = max(1, _before(begin, at, _BETWEEN)), at
        elif speaker not in (b"", b"user", b"system", b"developer"):
            end = _before(begin, at, _BETWEEN)
            break
        at = begin.find(needle, at + 1)
    if user < 0 or (end < 0 and not has_tools):
        return 0, []
    if end < 0:
        end = _before(begin, len(begin), b" \t\r\n]") if len(begin) == len(view) else len(begin)
    inside = [(a, b) for a, b in cuts if user <= a and b <= end]
    if (block := _BLOCK.match(begin, user, end)) is not None:
        inside = [block.span(1), *inside]
    if begin[end - 3 : end] == b"}]}":
        inside.append((end - 3, end - 1))
    return start, _kept(view[:end], inside, user)


def _speaker(text: bytes, at: int) -> bytes:
    """Who speaks in the item at ``at``; empty for a part of an item."""
    match = _SPEAKER.match(text, at)
    if match is None:
        return b""
    role, kind, speaker = match.groups()
    if role is not None:
        return role
    if kind == b"message":
        return speaker or b"assistant"
    return kind if kind == b"reasoning" or b"call" in kind else b""


def _kept(view: memoryview, cuts: list[Span], begin: int = 0) -> list[memoryview]:
    """``view`` from ``begin`` on without ``cuts``, which are in order."""
    kept = []
    for start, stop in cuts:
        if start > begin:
            kept.append(view[begin:start])
        begin = max(begin, stop)
    kept.append(view[begin:])
    return kept


def _cut_before(cuts: list[Span], at: int) -> int:
    """How many bytes before ``at`` are cut."""
    return sum([min(stop, at) - start for start, stop in cuts if start < at]) if cuts else 0


def _before(text: bytes, at: int, skipped: bytes) -> int:
    """Where ``text[:at]`` ends without the ``skipped`` bytes at its end."""
    return len(text[max(0, at - MOST_SPACE) : at].rstrip(skipped)) + max(0, at - MOST_SPACE)
