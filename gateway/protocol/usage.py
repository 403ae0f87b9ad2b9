"""The token counts of an answer, as reported by the engine; of one that was cut short, its events."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from msgspec import Raw

from gateway.protocol.json_decoders import NULL, answer, counts

# An answer up to this size is decoded whole; of a longer one (vectors, long texts) only its end is read.
MAX_DECODED = 16 * 1024
_KEY = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*\{')


class Usage(NamedTuple):
    """Tokens of one answer. ``prompt`` includes those that were ``cached``.

    Not ``exact`` if the answer was cut short: ``prompt`` is 0, and ``completion`` is the number of its
    events.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    exact: bool = True


_scanner = json.JSONDecoder()


def read_usage(raw: bytes | Raw) -> Usage | None:
    """The usage object ``raw``; ``None`` if it is none or not understood."""
    try:
        decoded = counts.decode(raw)
    except (ValueError, RecursionError):
        return None
    details = decoded.prompt_tokens_details or decoded.input_tokens_details
    cached = (details.cached_tokens if details is not None else decoded.cache_read_input_tokens) or 0
    prompt = decoded.prompt_tokens
    if prompt is None:
        if decoded.input_tokens is None and decoded.output_tokens is None:
            return None
        # Anthropic counts what was read from or written to a cache apart from the input.
        prompt = decoded.input_tokens or 0
        prompt += (decoded.cache_read_input_tokens or 0) + (decoded.cache_creation_input_tokens or 0)
    return Usage(prompt, cached, decoded.completion_tokens or decoded.output_tokens or 0)


def usage_inside(raw: bytes | Raw) -> Usage | None:
    """The usage of an object that holds one under ``usage``."""
    try:
        decoded = answer.decode(raw)
    except (ValueError, RecursionError):
        return None
    return None if decoded.usage is NULL or decoded.usage == NULL else read_usage(decoded.usage)


def usage_of_answer(end: bytes) -> Usage | None:
    """The usage of a JSON answer (``end`` is all or its last part): the last one that counts tokens."""
    if len(end) <= MAX_DECODED and end.lstrip().startswith(b"{") and (found := usage_inside(end)):
        return found
    for match in reversed(list(_KEY.finditer(end[-MAX_DECODED:]))):
        text = end[-MAX_DECODED:][match.end() - 1 :].decode("utf-8", "replace")
        try:
            _, length = _scanner.raw_decode(text)
        except (ValueError, RecursionError):
            continue
        if (found := read_usage(text[:length].encode())) is not None:
            return found
    return None
