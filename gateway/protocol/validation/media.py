"""Media of requests: how many there are, how large, and from where.

The gateway fetches nothing. Engines do, so a URL could let a client read what only their machines reach. It
is refused unless its host is allowed.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw

from gateway.protocol import json_decoders
from gateway.protocol.errors import Refused
from gateway.protocol.json_decoders import ITEMS, MEDIUM, MediaPart
from gateway.protocol.json_structure import (
    MAX_DEPTH,
    BoundExceeded,
    JsonMember,
    JsonPieceReader,
    StructureScan,
    name_of,
)
from gateway.protocol.validation.engine_work_limits import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    check_tools,
    first_item,
    too_many,
)
from policy.errors import Refusal

# Constants are read faster than names of other modules, in machine code.
ABSENT: Final = json_decoders.ABSENT
MEMBERS: Final = json_decoders.MEMBERS
OBJECTS: Final = json_decoders.OBJECTS
MAX_MEDIA: Final = 128
MAX_MEDIUM_BYTES: Final = 10 * 1024 * 1024
MAX_URL: Final = 8192
# Messages hold parts; results of tools hold parts, too, and documents within these.
MAX_LEVEL: Final = 4

# The fields of each route that may hold parts.
WALKED: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("messages",),
    "/v1/responses": ("input", "previous_input_messages"),
    "/v1/messages": ("messages",),
    "/v1/messages/count_tokens": ("messages",),
    "/v1/embeddings": ("messages", "input"),
    "/v1/score": ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items"),
    "/v1/rerank": ("query", "documents"),
    "/v1/tokenize": ("messages",),
}

_URLS = ("image_url", "audio_url", "video_url", "file_url")
_MEDIA = (*_URLS, "source", "input_audio", "file", "file_data")
# Tensors, and objects of the engine's process.
_FORBIDDEN = ("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil")
_HOLDS_MEDIA: Final = frozenset({*_MEDIA, *_FORBIDDEN})
# Embeddings of a prompt are no medium: a part of this type holds them as its data.
_EMBEDDINGS: Final = "prompt_embeds"
_LONGEST_TYPE: Final = 2 + 6 * len(_EMBEDDINGS)  # in quotes, all escaped
# What Anthropic's blocks and messages of developers define, beside the tools of the body.
_TOOLS: Final = ("tool", "tools")
# As bytes: a body without these names within its members has no media, and no other tools.
HOLDS_MEDIA: Final = frozenset({name.encode() for name in (*_HOLDS_MEDIA, *_TOOLS, "data")})
_MEDIUM: Final = frozenset(MediaPart.__struct_fields__)
# Only what every parser of URLs reads alike: neither credentials nor backslashes.
_URL: Final = re.compile(
    r"(?i:https?)://(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*)(?::[0-9]{1,5})?(?:[/?#][!#-\[\]-~]*)?"
)
_DATA: Final = b'"data:'
_OPEN: Final = ord("[")
_OBJECT: Final = ord("{")
_QUOTE: Final = ord('"')
_NULL: Final = ord("n")
_NESTS: Final = b"{["
_PARTS_BEGIN: Final = b'{["'
# Decoded in one turn of the event loop.
_AT_ONCE: Final = 64 * 1024
# As much time as reading so many bytes takes each of them.
_OF_ITEM: Final = 64


class MediaCheck:
    """Counts the media of one field of a body, and the ``tools`` that it defines.

    ``hosts`` are those from which engines may fetch media.
    """

    __slots__ = ("_hosts", "_items", "_name", "_tool_bytes", "count", "tools")

    def __init__(self, name: str, hosts: frozenset[str]) -> None:
        self._hosts = hosts
        self._name = name
        self._items = self._tool_bytes = self.count = self.tools = 0

    def walk(self, value: Raw, level: int = 0) -> None:
        """Check all that ``value`` holds, a list or an object; texts and lists of numbers are skipped."""
        view = memoryview(value)
        if view[0] == _OBJECT:
            self._bound(1, level)
            self._part(MEMBERS.decode(value), level)
        elif view[0] == _OPEN:
            first = first_item(view)
            if first == _OBJECT:
                try:
                    parts = OBJECTS.decode(value)
                except msgspec.ValidationError:  # there are texts among them
                    first = _OPEN
                else:
                    self._bound(len(parts), level)
                    for part in parts:
                        self._part(part, level)
            if first in (_OPEN, _QUOTE):
                items = ITEMS.decode(value)
                self._bound(len(items), level)
                for item in items:
                    kind = memoryview(item)[0]
                    if kind == _OBJECT:
                        self._part(MEMBERS.decode(item), level)
                    elif kind == _OPEN:
                        self.walk(item, level + 1)

    async def walk_large(self, raw: bytes, span: JsonMember, pieces: JsonPieceReader, level: int = 0) -> None:
        """As :meth:`walk`, of the value at ``span`` of ``raw``, which may have any size."""
        value = _at(raw, span)
        kind = raw[span.begin]
        if span.end - span.begin <= _AT_ONCE:
            self.walk(value, level)
        elif kind == _OBJECT:
            await self._large_part(raw, span, pieces, level)
        elif kind == _OPEN and first_item(memoryview(value)) in _PARTS_BEGIN:
            read = 0
            for item in await self._members(raw, span, pieces):
                await self.walk_large(raw, item, pieces, level + (raw[item.begin] == _OPEN))
                read += min(item.end - item.begin, _AT_ONCE) + _OF_ITEM
                if read > _AT_ONCE:
                    read = 0
                    await pieces.pause()

    def _part(self, part: dict[str, Raw], level: int) -> None:
        """Check one message or part, and those that it holds."""
        for name in _TOOLS:
            if name in part:
                self._define(part[name])
        if "data" in part and _holds_embeddings(part.get("type", ABSENT)):
            raise self._forbidden(_EMBEDDINGS)
        if not _HOLDS_MEDIA.isdisjoint(part):
            for name, value in self._present(part):
                kind = memoryview(value)[0]
                medium = MEDIUM.decode(value) if kind == _OBJECT else _bare(name, value)
                self._judge(name, medium, is_document=_is_document(part.get("type", ABSENT)))
                self._inside(medium.content, level)
        if (content := part.get("content")) is not None:
            self._inside(content, level)
        if (output := part.get("output")) is not None:
            self._inside(output, level)

    def _inside(self, value: Raw, level: int) -> None:
        if value is not ABSENT and memoryview(value)[0] in _NESTS:
            self.walk(value, level + 1)

    async def _large_part(self, raw: bytes, span: JsonMember, pieces: JsonPieceReader, level: int) -> None:
        self._bound(1, level)
        fields = await self._fields(raw, span, pieces)
        inner = [fields[name] for name in ("content", "output") if name in fields]
        for name in _TOOLS:
            if name in fields:
                await pieces.alone(partial(self._define, _at(raw, fields[name])))
        if "data" in fields and "type" in fields and _holds_embeddings(_at(raw, fields["type"])):
            raise self._forbidden(_EMBEDDINGS)
        if not _HOLDS_MEDIA.isdisjoint(fields):
            for name, value in self._present({name: _at(raw, fields[name]) for name in fields}):
                medium = _bare(name, value)
                if memoryview(value)[0] == _OBJECT:
                    held = await self._fields(raw, fields[name], pieces)
                    medium = MediaPart(**{key: _at(raw, held[key]) for key in held if key in _MEDIUM})
                    inner += [held["content"]] if "content" in held else []
                kind = _at(raw, fields["type"]) if "type" in fields else ABSENT
                self._judge(name, medium, is_document=_is_document(kind))
        for each in inner:
            if raw[each.begin] in _NESTS:
                await self.walk_large(raw, each, pieces, level + 1)

    async def _members(self, raw: bytes, span: JsonMember, pieces: JsonPieceReader) -> list[JsonMember]:
        scan = StructureScan(raw, MAX_DEPTH, MAX_MESSAGES, begin=span.begin, end=span.end)
        try:
            return await pieces.members(scan)
        except BoundExceeded as bound:
            raise Refused(Refusal.BAD_REQUEST, f"{self._name} {bound}.", param=self._name) from None

    async def _fields(self, raw: bytes, span: JsonMember, pieces: JsonPieceReader) -> dict[str, JsonMember]:
        return {name_of(each.name): each for each in await self._members(raw, span, pieces)}

    def _bound(self, count: int, level: int) -> None:
        self._items += count
        if self._items > MAX_MESSAGES:
            raise too_many(self._name, MAX_MESSAGES, self._items, "messages and parts")
        if count and level > MAX_LEVEL:
            raise self._refused(f"parts are nested deeper than {MAX_LEVEL} levels")

    def _define(self, value: Raw) -> None:
        """Check one tool or a list of them, as those of the body."""
        view = memoryview(value)
        if view[0] not in _NESTS:
            return
        self._tool_bytes += len(view)
        if self._tool_bytes > MAX_TOOLS_BYTES:
            raise too_many(self._name, MAX_TOOLS_BYTES, self._tool_bytes, "bytes of tools")
        items = ITEMS.decode(value) if view[0] == _OPEN else [value]
        self.tools += len(items)
        if self.tools > MAX_TOOLS:
            raise too_many(self._name, MAX_TOOLS, self.tools, "tools")
        check_tools(items, f"{self._name}.tools")

    def _present(self, part: dict[str, Raw]) -> list[tuple[str, Raw]]:
        """The media of ``part``, by field."""
        for name in _FORBIDDEN:
            if not _is_null(part.get(name, ABSENT)):
                raise self._forbidden(name)
        # The name that an engine keeps a medium by, for all who send it.
        if not _is_null(part.get("uuid", ABSENT)):
            raise self._forbidden("uuid")
        return [(name, part[name]) for name in _MEDIA if name in part and not _is_null(part[name])]

    def _judge(self, name: str, medium: MediaPart, *, is_document: bool) -> None:
        """Count a medium, and refuse one that is too large, or from elsewhere.

        The source of a document may be its text; of an image engines take any source as one.
        """
        data = medium.data if medium.file_data is ABSENT else medium.file_data
        has_url = not _is_null(medium.url)
        is_text = is_document and bytes(memoryview(medium.type)[:8]) == b'"text"'
        if not has_url and (_is_null(data) or is_text):
            return
        self.count += 1
        if self.count > MAX_MEDIA:
            raise too_many(self._name, MAX_MEDIA, self.count, "images, videos and recordings")
        for value in (data, medium.url):
            if (size := len(memoryview(value))) > MAX_MEDIUM_BYTES:
                raise self._refused(f"{name} takes at most {MAX_MEDIUM_BYTES} bytes, got {size}")
        if has_url:
            self._url(name, medium.url)

    def _url(self, name: str, value: Raw) -> None:
        view = memoryview(value)
        if bytes(view[: len(_DATA)]).lower() == _DATA:
            return
        if view[0] != _QUOTE or len(view) > MAX_URL:
            raise self._refused(f"{name} must be a URL of at most {MAX_URL} bytes")
        text = msgspec.json.decode(value, type=str)
        match = _URL.fullmatch(text)
        if match is None:
            raise self._refused(f"{name} must be a data: or https:// URL")
        host = match["host"].lower()
        if host not in self._hosts:
            raise self._refused(
                f"{name}: this server fetches nothing from {host[:256]!r}: send the medium as a data: URL",
                Refusal.UNSUPPORTED,
            )

    def _forbidden(self, name: str) -> Refused:
        return self._refused(f"{name} is not accepted by this server", Refusal.UNSUPPORTED)

    def _refused(self, what: str, reason: Refusal = Refusal.BAD_REQUEST) -> Refused:
        return Refused(reason, f"{self._name}: {what}.", param=self._name)


def _at(raw: bytes, span: JsonMember) -> Raw:
    return Raw(memoryview(raw)[span.begin : span.end])


def _is_null(value: Raw) -> bool:
    return value is ABSENT or memoryview(value)[0] == _NULL


def _is_document(kind: Raw) -> bool:
    return bytes(memoryview(kind)[:11]) == b'"document"'


def _holds_embeddings(kind: Raw) -> bool:
    """Whether a part of type ``kind`` is embeddings of a prompt."""
    view = memoryview(kind)
    is_short_text = 0 < len(view) <= _LONGEST_TYPE and view[0] == _QUOTE
    return is_short_text and bool(msgspec.json.decode(kind) == _EMBEDDINGS)


def _bare(name: str, value: Raw) -> MediaPart:
    """The medium of a field that is no object: a URL, or bytes."""
    if name in _URLS:
        return MediaPart(url=value)
    # Of a search result, ``source`` is a text to be quoted.
    return MediaPart(data=value) if name != "source" else MediaPart()
