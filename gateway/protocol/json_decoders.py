"""The fields that the gateway reads of request bodies and of engines' answers, and their decoders.

This module stays uncompiled: msgspec builds its structures from classes at run time.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

ABSENT = Raw(b"")


class RequestBody(msgspec.Struct, gc=False):
    """The fields that are decided on; all are ``members``, and go through unread.

    ``media`` is the number of images, videos and recordings, ``prompts`` that of a completion's prompts,
    ``inputs`` that of the longest list of inputs; with ``defines_tools`` messages define tools. These are
    found when the body is checked. ``added`` is what engines get behind the last member.
    """

    model: str
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    background: bool | None = None
    system: Raw = ABSENT
    instructions: Raw = ABSENT
    messages: Raw = ABSENT
    prompt: Raw = ABSENT
    input: Raw = ABSENT
    tools: Raw = ABSENT
    stream_options: Raw = ABSENT
    cache_salt: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    metadata: Raw = ABSENT
    # Set by us: these names are known on no route.
    members: dict[str, Raw] = msgspec.field(default_factory=dict, name="(members)")
    media: int = msgspec.field(default=0, name="(media)")
    prompts: int = msgspec.field(default=1, name="(prompts)")
    inputs: int = msgspec.field(default=1, name="(inputs)")
    defines_tools: bool = msgspec.field(default=False, name="(defines_tools)")
    added: bytes = msgspec.field(default=b"", name="(added)")

    @property
    def choices(self) -> int:
        """How many choices a complete answer has: ``n`` for each prompt."""
        return (self.n or 1) * self.prompts


class RequestMetadata(msgspec.Struct, gc=False):
    """The members of a body's ``metadata`` in which agents name their session, of any type."""

    user_id: Any = None
    session_id: Any = None


class MediaPart(msgspec.Struct, gc=False):
    """What a part's medium is: its URL, its bytes in base64, or parts of its own."""

    type: Raw = ABSENT
    url: Raw = ABSENT
    data: Raw = ABSENT
    file_data: Raw = ABSENT
    content: Raw = ABSENT


# The fields of a body by their types.
SCALARS = frozenset(
    {"model", "stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "background"}
)
_SET_BY_US = {"members", "media", "prompts", "inputs", "defines_tools", "added"}
RAW_FIELDS = frozenset(RequestBody.__struct_fields__) - SCALARS - _SET_BY_US

BODY = msgspec.json.Decoder(RequestBody)
MEMBERS = msgspec.json.Decoder(dict[str, Raw])
ITEMS = msgspec.json.Decoder(list[Raw])
OBJECTS = msgspec.json.Decoder(list[dict[str, Raw]])
MEDIUM = msgspec.json.Decoder(MediaPart)
OPTIONS = msgspec.json.Decoder(dict[str, Raw] | None)
METADATA = msgspec.json.Decoder(RequestMetadata | None)
USER = msgspec.json.Decoder(RequestMetadata)

NULL = Raw(b"null")


class ResponseChoice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None


class CompletionChunk(msgspec.Struct, gc=False):
    """An event of chat or completions."""

    choices: list[ResponseChoice] | None = None
    usage: Raw = NULL
    error: Raw = NULL


class TypedEvent(msgspec.Struct, gc=False):
    """An event of responses or messages."""

    type: str | None = None
    usage: Raw = NULL
    response: Raw = NULL
    message: Raw = NULL
    error: Raw = NULL


class PromptTokensDetails(msgspec.Struct, gc=False):
    """The prompt's part of a usage object."""

    cached_tokens: int | None = None


class UsageFields(msgspec.Struct, gc=False):
    """The three dialects of a usage object: chat and completions, responses, messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: PromptTokensDetails | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class NonStreamingResponse(msgspec.Struct, gc=False):
    """A whole answer; that of responses has an ``error`` when it failed on the way."""

    usage: Raw = NULL
    error: Raw = NULL


any_json = msgspec.json.Decoder(Raw)
chunk = msgspec.json.Decoder(CompletionChunk)
typed = msgspec.json.Decoder(TypedEvent)
counts = msgspec.json.Decoder(UsageFields)
answer = msgspec.json.Decoder(NonStreamingResponse)
