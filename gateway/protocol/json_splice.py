"""Edit a JSON object at offsets: unedited parts keep their bytes and are not copied.

An absent member is inserted behind the opening brace; a present one has its value replaced at the offset that
the decoder found, so that equal names in nested objects or texts are never hit.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from gateway.protocol import json_decoders
from gateway.protocol.body import RequestBody
from gateway.protocol.buffer_offset import address
from gateway.protocol.json_decoders import OPTIONS
from gateway.protocol.paths import ProxyRoute

# Constants are read faster than names of other modules, in machine code.
ABSENT: Final = json_decoders.ABSENT
Buffer = bytes | memoryview
_TRUE = Raw(b"true")
# Pydantic's words, in any case. It also takes the number 1.
_WORDS_FOR_TRUE: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
_REPORT = b'{"kv_cache_report_mode":"full"}'
# A shorter body is copied, in less time than views of it take.
_COPIED: Final = 4096


class JsonEdit:
    """``text`` instead of the bytes from ``begin`` to ``end``."""

    # Written out, because named tuples are not compiled.
    __slots__ = ("begin", "end", "text")

    def __init__(self, begin: int, end: int, text: bytes) -> None:
        self.begin = begin
        self.end = end
        self.text = text


def locate(raw: bytes, value: Raw) -> tuple[int, int]:
    """Begin and end of ``value`` in ``raw``; raises ``ValueError`` if it was decoded from other bytes."""
    begin = address(value) - address(raw)
    size = len(memoryview(value))
    if not 0 <= begin <= len(raw) - size:
        raise ValueError("the value is not a part of these bytes")
    return begin, begin + size


def set_member(raw: bytes, name: str, value: Raw, text: bytes) -> JsonEdit:
    """Give ``name`` the JSON ``text`` in ``raw``, a non-empty object; ``value`` is its present one."""
    if value is not ABSENT:
        at, end = locate(raw, value)
        return JsonEdit(at, end, text)
    begin = raw.index(b"{") + 1
    return JsonEdit(begin, begin, b'"%b":%b,' % (name.encode(), text))


def set_model(raw: bytes, body: RequestBody, name: str) -> JsonEdit:
    at, end = locate(raw, body.members["model"])
    return JsonEdit(at, end, msgspec.json.encode(name))


def force_usage(raw: bytes, stream_options: Raw) -> JsonEdit | None:
    """Have a stream end with its usage; ``None`` if it does, and for options that the engine refuses.

    What engines read as a boolean ("on", 0.0) is replaced by one, so that all is counted. Usage per chunk is
    dropped unless the client asked for usage.
    """
    options = _options_of(stream_options)
    if options is None:
        return None
    wanted = options.get("include_usage", ABSENT)
    if bytes(wanted) == b"true":
        return None
    if not _is_true(wanted):
        options.pop("continuous_usage_stats", None)
    options["include_usage"] = _TRUE
    return set_member(raw, "stream_options", stream_options, msgspec.json.encode(options))


def asks_for_usage(stream_options: Raw) -> bool:
    """Whether the client asked for the usage at the end of its stream."""
    options = _options_of(stream_options)
    return options is not None and _is_true(options.get("include_usage", ABSENT))


def _options_of(stream_options: Raw) -> dict[str, Raw] | None:
    """The options, ``None`` if they are no object."""
    if stream_options is ABSENT:
        return {}
    try:
        return OPTIONS.decode(stream_options) or {}
    except ValueError:
        return None


def _is_true(value: Raw) -> bool:
    """Whether engines read ``value`` as true: they take pydantic's forms of a boolean."""
    if value is ABSENT:
        return False
    try:
        found = msgspec.json.decode(value)
    except ValueError:  # no UTF-8, or a number that is too large
        return False
    return found.lower() in _WORDS_FOR_TRUE if isinstance(found, str) else bool(found == 1)


def splice(raw: bytes, edits: list[JsonEdit]) -> list[Buffer]:
    """``raw`` with ``edits``, as buffers to be written one after the other."""
    parts: list[Buffer] = []
    view = memoryview(raw)
    at = 0
    for edit in edits if len(edits) < 2 else sorted(edits, key=lambda edit: (edit.begin, edit.end)):
        if edit.begin < at:
            raise ValueError("edits overlap")
        if edit.begin > at:
            parts.append(view[at : edit.begin])
        if edit.text:
            parts.append(edit.text)
        at = edit.end
    if at < len(raw):
        parts.append(view[at:])
    return parts


# Routes whose streams end with their usage only if the request asks for it.
ASKED_FOR_USAGE: Final = frozenset({"/v1/chat/completions", "/v1/completions"})


class UpstreamRequestBody:
    """``parts`` of ``size`` bytes in all. ``counts``: usage at a stream's end was requested by us alone."""

    __slots__ = ("counts", "parts", "size")

    def __init__(self, parts: bytes | list[Buffer], size: int, counts: bool) -> None:
        self.parts = parts
        self.size = size
        self.counts = counts


def edited_body(
    route: ProxyRoute, body: RequestBody, raw: bytes, edits: list[JsonEdit]
) -> UpstreamRequestBody:
    """``raw`` with ``edits`` and what was added to ``body``; streams are made to end with their usage."""
    usage = force_usage(raw, body.stream_options) if body.stream and route.path in ASKED_FOR_USAGE else None
    counts = False
    if usage is not None:
        edits.append(usage)
        counts = not asks_for_usage(body.stream_options)
    if added := body.added:
        # At the end, where it counts before a null of the same name.
        end = raw.rindex(b"}")
        edits.append(JsonEdit(end, end, added))
    if not edits:
        return UpstreamRequestBody(raw, len(raw), False)
    if len(edits) == 1 and len(raw) <= _COPIED:
        [edit] = edits
        whole = b"%b%b%b" % (raw[: edit.begin], edit.text, raw[edit.end :])
        return UpstreamRequestBody(whole, len(whole), counts)
    parts = splice(raw, edits)
    return UpstreamRequestBody(parts, sum([len(part) for part in parts]), counts)


def upstream_body(
    route: ProxyRoute,
    body: RequestBody,
    raw: bytes,
    salt: bytes,
    name: str = "",
    *,
    reports_cache: bool = False,
) -> UpstreamRequestBody:
    """``raw`` with the tenant's cache ``salt`` (a JSON string, or empty) in place of the client's.

    ``model`` becomes ``name``, that of an adapter or of an external server, unless it is empty. With
    ``reports_cache`` vLLM's KV events repeat what the prompt finds in the cache.
    """
    edits = []
    if name and name != body.model:
        edits.append(set_model(raw, body, name))
    if salt and route.runner is not None:  # token counts use no cache
        edits.append(set_member(raw, "cache_salt", body.cache_salt, salt))
    if reports_cache and route.path in ASKED_FOR_USAGE:
        edits.append(set_member(raw, "vllm_xargs", body.members.get("vllm_xargs", ABSENT), _REPORT))
    return edited_body(route, body, raw, edits)
