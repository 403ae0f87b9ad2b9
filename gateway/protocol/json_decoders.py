"""The fields that the gateway reads of request bodies and of engines' answers, and their decoders.

This module stays uncompiled: msgspec builds its structures from classes at run time.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from gateway.protocol.json_structure import count_items

ABSENT = Raw(b"")

# Several prompts: texts, or lists of token ids.
_PROMPTS = re.compile(rb"\[[ \t\r\n]*[\"\[]")


class Body(msgspec.Struct, gc=False):
    """The fields that are checked or decided on; everything else goes through unread."""

    model: str
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    stop: Raw = ABSENT
    system: Raw = ABSENT
    instructions: Raw = ABSENT
    messages: Raw = ABSENT
    prompt: Raw = ABSENT
    input: Raw = ABSENT
    tools: Raw = ABSENT
    structured_outputs: Raw = ABSENT
    stream_options: Raw = ABSENT
    cache_salt: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    metadata: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    priority: Raw = ABSENT
    request_id: Raw = ABSENT
    kv_transfer_params: Raw = ABSENT
    ec_transfer_params: Raw = ABSENT
    vllm_xargs: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT
    media_io_kwargs: Raw = ABSENT
    prompt_embeds: Raw = ABSENT
    allowed_token_ids: Raw = ABSENT
    use_beam_search: Raw = ABSENT
    return_prompt_text: Raw = ABSENT
    prompt_logprobs: Raw = ABSENT
    chat_template: Raw = ABSENT
    background: bool | None = None

    @property
    def choices(self) -> int:
        """How many choices a complete answer has: ``n`` for each prompt."""
        n = self.n or 1
        return n if self.prompt is ABSENT else n * self._prompts()

    def _prompts(self) -> int:
        return self._items() if _PROMPTS.match(memoryview(self.prompt)) else 1

    def _items(self) -> int:
        return count_items(bytes(self.prompt))


class LargeBody(Body, gc=False):
    """A body that was read in pieces; :func:`gateway.protocol.body.read_large` sets what is no scalar.

    ``members`` are all of its members, ``prompts`` is the number of items in the prompt.
    """

    members: dict[str, Raw] = {}
    prompts: int = 0

    def _items(self) -> int:
        return self.prompts


class Named(msgspec.Struct, gc=False):
    """The model alone, as it is written."""

    model: Raw


class Metadata(msgspec.Struct, gc=False):
    """The members of a body's ``metadata`` in which agents name their session, of any type."""

    user_id: Any = None
    session_id: Any = None


BODY = msgspec.json.Decoder(Body)
LARGE_BODY = msgspec.json.Decoder(LargeBody)
OPTIONS = msgspec.json.Decoder(dict[str, Raw] | None)
NAMED = msgspec.json.Decoder(Named)
METADATA = msgspec.json.Decoder(Metadata | None)
USER = msgspec.json.Decoder(Metadata)
# The fields of a body by their types, and those of which a long one is refused: none that clients may fill.
RAW_FIELDS = frozenset(field.name for field in msgspec.structs.fields(Body) if field.type is Raw)
SCALARS = frozenset(Body.__struct_fields__) - RAW_FIELDS
_LONG_FIELDS = {"system", "instructions", "messages", "prompt", "input", "tools", "structured_outputs"}
SHORT_FIELDS = SCALARS | RAW_FIELDS - _LONG_FIELDS - {"metadata", "prompt_cache_key"}

NULL = Raw(b"null")


class Choice(msgspec.Struct, gc=False):
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
    """The prompt's part of a usage object."""

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
    """A whole answer; that of responses has an ``error`` when it failed on the way."""

    usage: Raw = NULL
    error: Raw = NULL


any_json = msgspec.json.Decoder(Raw)
chunk = msgspec.json.Decoder(Chunk)
typed = msgspec.json.Decoder(Typed)
counts = msgspec.json.Decoder(Counts)
answer = msgspec.json.Decoder(Answer)
