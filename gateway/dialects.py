"""The few fields that are read of what engines answer, and their decoders.

Apart from what reads them, since msgspec makes its structures of classes and mypyc of modules.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

NULL = Raw(b"null")


class Choice(msgspec.Struct, gc=False):
    """One choice of a chunk."""

    index: int = 0
    finish_reason: str | None = None


class Chunk(msgspec.Struct, gc=False):
    """An event of chat or completions."""

    choices: list[Choice] | None = None
    usage: Raw = NULL
    error: Raw = NULL


class Typed(msgspec.Struct, gc=False):
    """An event of responses or messages."""

    type: str | None = None
    usage: Raw = NULL
    response: Raw = NULL
    message: Raw = NULL
    error: Raw = NULL


class Details(msgspec.Struct, gc=False):
    """What a usage object says of its prompt."""

    cached_tokens: int | None = None


class Counts(msgspec.Struct, gc=False):
    """The three dialects of a usage object: chat and completions, responses, messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class Answer(msgspec.Struct, gc=False):
    """What holds a usage object."""

    usage: Raw = NULL


chunk = msgspec.json.Decoder(Chunk)
typed = msgspec.json.Decoder(Typed)
counts = msgspec.json.Decoder(Counts)
answer = msgspec.json.Decoder(Answer)
