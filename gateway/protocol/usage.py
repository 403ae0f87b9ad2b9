"""The token counts of an answer, as reported by the engine; of one that was cut short, its events."""

from __future__ import annotations

import json
import re
from typing import Final

from msgspec import Raw

from gateway.protocol import json_decoders
from gateway.protocol.body import RequestBody
from gateway.protocol.json_decoders import NonStreamingResponse
from gateway.protocol.prompt_features import MOST_ANSWER_TOKENS, limit_of, token_ids
from gateway.protocol.validation.engine_work_limits import MAX_INTEGER
from policy.request import Request

# Constants are read faster than names of other modules, in machine code.
NULL: Final = json_decoders.NULL
answer: Final = json_decoders.answer
counts: Final = json_decoders.counts
# An answer up to this size is decoded whole; of a longer one (vectors, long texts) only its end is read.
MAX_USAGE_BYTES: Final = 16 * 1024
# Members named so that are tried, from the last.
MAX_CANDIDATES: Final = 4
_KEY: Final = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*\{')
# The longest tokens are runs of 128 spaces. A template adds a system prompt and the format of tools; prompts
# with media or an engine's own tools have tokens that no byte of the request accounts for, or the reverse.
MOST_BYTES_A_TOKEN: Final = 128
MOST_TEMPLATE_TOKENS: Final = 4096
# What engines read as text: of a prompt, and of pairs that are scored, where "documents" are a part of it.
_PROMPTS: Final = ("messages", "prompt", "input")
_TEXTS: Final = (*_PROMPTS, "system", "instructions", "tools")
_PAIRED: Final = (
    "query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2", "input_1", "input_2",
)  # fmt: skip
_TYPE: Final = b'"type"'
_UNWRITTEN: Final = re.compile(
    rb"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}"
    rb'"(?:(?:input_)?(?:image|audio|video|file)|mcp|web_search|code_interpreter)'
)
# One search of a megabyte takes 0.7 ms at most, one of each type 5 to 9. A request of a thousand parts and
# tools is not looked at further.
MOST_SEARCHED: Final = 1024 * 1024
MOST_TYPES: Final = 1000
# A token may come in several events.
MOST_EVENTS_A_TOKEN: Final = 8


class TokenUsage:
    """Tokens of one answer. ``prompt`` includes those that were ``cached``.

    Not ``exact`` if the answer was cut short: ``prompt`` is 0, and ``completion`` is the number of its
    events. Nor if the engine's counts contradict the request: both are estimates.
    """

    # Written out, because named tuples are not compiled.
    __slots__ = ("cached", "completion", "exact", "prompt")

    def __init__(self, prompt: int = 0, cached: int = 0, completion: int = 0, exact: bool = True) -> None:
        self.prompt = prompt
        self.cached = cached
        self.completion = completion
        self.exact = exact

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenUsage):
            return NotImplemented
        return self._counts() == other._counts()

    def __hash__(self) -> int:
        return hash(self._counts())

    def __repr__(self) -> str:
        return f"Usage{self._counts()}"

    def _counts(self) -> tuple[int, int, int, bool]:
        return self.prompt, self.cached, self.completion, self.exact


class EventTokens:
    """The tokens of a stream by its events: with ``stream_interval`` each but the first has several."""

    __slots__ = ("_choices", "_interval", "_most")

    def __init__(self, interval: int, choices: int, most: int) -> None:
        self._interval = interval
        self._choices = choices
        self._most = most

    def of(self, events: int) -> int:
        """Of a stream that was cut after so many events."""
        first = min(events, self._choices)
        return min(first + (events - first) * self._interval, self._most)


def event_tokens(body: RequestBody) -> EventTokens | None:
    """How to count the tokens of a stream, where an event may have several; ``body`` is checked."""
    value = body.members.get("stream_interval", NULL)
    if value == NULL:
        return None
    try:
        interval = int(float(bytes(value)))
    except ValueError:  # which engines refuse
        return None
    most = (limit_of(body) or MOST_ANSWER_TOKENS) * body.choices
    return EventTokens(interval, body.choices, min(most, MAX_INTEGER)) if interval > 1 else None


class UsageBounds:
    """Which token counts the answer to one request can have; what is learned from answers is within them."""

    __slots__ = ("_body", "_max_model_len", "_raw", "_request")

    def __init__(self, request: Request, body: RequestBody, raw: bytes, max_model_len: int | None) -> None:
        self._request = request
        self._body = body
        self._raw = raw
        self._max_model_len = max_model_len

    def contradiction(self, usage: TokenUsage, events: int) -> str:
        """Which count is impossible, empty if none is; ``events`` are those of the stream, 0 without one."""
        prompt = usage.prompt
        size = len(self._raw)
        # Of pairs that are scored, each may have the same query.
        pairs = self._body.inputs if self._is_paired() else 1
        possible = prompt <= pairs * (size + MOST_TEMPLATE_TOKENS)
        if prompt < size // MOST_BYTES_A_TOKEN:  # else the text, a part of the body, is short enough
            possible = prompt >= self._text_bytes() // MOST_BYTES_A_TOKEN
        if prompt < 0 or not (possible or self._has_unwritten()):
            return "prompt"
        if not 0 <= usage.cached <= prompt:
            return "cached"
        most = limit_of(self._body) or self._max_model_len or MOST_ANSWER_TOKENS
        if not events // MOST_EVENTS_A_TOKEN <= usage.completion <= most * self._body.choices:
            return "completion"
        return ""

    def _is_paired(self) -> bool:
        members = self._body.members
        return not any(name in members for name in _PROMPTS)

    def _text_bytes(self) -> int:
        """The size of what the engine reads as text, in JSON; 0 if it reads no more than it is told to."""
        members = self._body.members
        if members.get("truncate_prompt_tokens", NULL) != NULL:
            return 0
        names = _TEXTS if any(name in members for name in _PROMPTS) else _PAIRED
        texts = [memoryview(members[name]) for name in names if name in members]
        return sum([len(text) for text in texts if not token_ids(text)])

    def _has_unwritten(self) -> bool:
        """Whether the prompt may have more tokens than its text, or fewer; true where it is not known."""
        raw = self._raw
        if self._body.media or len(raw) > MOST_SEARCHED:
            return True
        end = 0
        for _ in range(MOST_TYPES):
            at = raw.find(_TYPE, end)
            if at < 0:
                return False
            end = at + len(_TYPE)
            if _UNWRITTEN.match(raw, end) is not None:
                return True
        return True

    def estimate(self, events: int) -> TokenUsage:
        """What is counted instead of impossible counts."""
        return TokenUsage(self._request.prompt_tokens, 0, events or self._request.output_tokens, exact=False)


_scanner = json.JSONDecoder()


def read_usage(raw: bytes | Raw) -> TokenUsage | None:
    """The usage object ``raw``; ``None`` if it is none or not understood."""
    return _read(raw) if len(memoryview(raw)) <= MAX_USAGE_BYTES else None


def _read(raw: bytes | Raw) -> TokenUsage | None:
    """As :func:`read_usage`, of at most :data:`MAX_USAGE_BYTES`."""
    try:
        decoded = counts.decode(raw)
    except (ValueError, RecursionError):
        return None
    prompt = decoded.prompt_tokens
    details = decoded.prompt_tokens_details or decoded.input_tokens_details
    cached = (details.cached_tokens if details is not None else decoded.cache_read_input_tokens) or 0
    if prompt is None:
        if decoded.input_tokens is None and decoded.output_tokens is None:
            return None
        # Anthropic counts what was read from or written to a cache apart from the input.
        prompt = decoded.input_tokens or 0
        prompt += (decoded.cache_read_input_tokens or 0) + (decoded.cache_creation_input_tokens or 0)
    return TokenUsage(prompt, cached, decoded.completion_tokens or decoded.output_tokens or 0)


def usage_inside(raw: bytes | Raw) -> TokenUsage | None:
    """The usage of an object that holds one under ``usage``; of a long object, in its end."""
    text = memoryview(raw)
    if len(text) > MAX_USAGE_BYTES:
        return _last_usage(bytes(text[-MAX_USAGE_BYTES:]))
    try:
        decoded = answer.decode(raw)
    except (ValueError, RecursionError):
        return None
    return None if decoded.usage is NULL or decoded.usage == NULL else read_usage(decoded.usage)


def usage_of_answer(end: bytes, decoded: NonStreamingResponse | None = None) -> TokenUsage | None:
    """The usage of a JSON answer (``end`` is all or its last part): the last one that counts tokens.

    ``decoded`` is the whole answer, where that was decoded already.
    """
    if decoded is not None:
        usage, read = decoded.usage, _read if len(end) <= MAX_USAGE_BYTES else read_usage
        if usage is not NULL and (found := read(usage)) is not None:
            return found
    if len(end) <= MAX_USAGE_BYTES and end.lstrip().startswith(b"{") and (found := usage_inside(end)):
        return found
    return _last_usage(end[-MAX_USAGE_BYTES:])


def _last_usage(end: bytes) -> TokenUsage | None:
    for match in list(_KEY.finditer(end))[: -MAX_CANDIDATES - 1 : -1]:
        text = end[match.end() - 1 :].decode("utf-8", "replace")
        try:
            _, length = _scanner.raw_decode(text)
        except (ValueError, RecursionError):
            continue
        if (found := read_usage(text[:length].encode())) is not None:
            return found
    return None
