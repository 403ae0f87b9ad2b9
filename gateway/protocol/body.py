"""Decode the few fields of a request's body that the gateway uses, and refuse what it does not allow."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw

from gateway.protocol import json_decoders
from gateway.protocol.errors import Refused
from gateway.protocol.json_decoders import BODY, ITEMS, MEMBERS, RAW_FIELDS, SCALARS, RequestBody
from gateway.protocol.json_structure import (
    MAX_DEPTH,
    MAX_GAP_BYTES,
    BoundExceeded,
    JsonMember,
    JsonPieceReader,
    StructureScan,
    depth_exceeds,
    lacks_members,
    name_of,
)
from gateway.protocol.paths import ProxyRoute
from gateway.protocol.validation.engine_work_limits import (
    CHECKS,
    INPUTS,
    LONG_FIELDS,
    MAX_FIELD,
    MAX_INPUTS,
    MAX_N,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    SCHEMAS,
    check_schemas,
    check_size,
    check_tools,
    first_item,
    inputs_of,
    too_many,
)
from gateway.protocol.validation.forwarded_fields import KNOWN, STEERING
from gateway.protocol.validation.media import HOLDS_MEDIA, WALKED, MediaCheck
from policy.errors import Refusal

__all__ = ["AcceptedBody", "BodyRules", "RequestBody", "accept", "accept_large", "read", "read_large"]

# Up to this size a body is decoded at once, in 3 ms at most; a larger one is read in pieces.
MAX_DECODED: Final = 256 * 1024
# A shorter one is read twice, which takes less time than taking parts of it together.
SHORT_BYTES: Final = 8 * 1024
# Of a body that is read in pieces: engines know some eighty parameters.
MAX_MEMBERS: Final = 1024

# Constants are read faster than names of other modules, in machine code.
ABSENT: Final = json_decoders.ABSENT
# What a body's field is to the gateway.
_DECIDE: Final = 0
_CHECK: Final = 1
_PASS: Final = 2
_PATH: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_OBJECT: Final = re.compile(rb"[ \t\r\n]*\{")
_MISSING: Final = re.compile(r"Object missing required field `(?P<key>.*)`")
# vLLM reads these before it validates them, and fails on other types, as if the replica were at fault.
_LIST: Final = b"["
_LIST_OR_NULL: Final = b"[n"
# Machine code reads a constant faster than a name of another module.
_decode_body: Final = BODY.decode
_decode_members: Final = MEMBERS.decode


def _uses(known: frozenset[str]) -> dict[str, int]:
    uses = dict.fromkeys(known, _PASS)
    uses |= {name: _CHECK for name in CHECKS if name in known or name in STEERING}
    return uses | dict.fromkeys((RAW_FIELDS | SCALARS) & known, _DECIDE)


_USES: Final = {path: _uses(known) for path, known in KNOWN.items()}
_ALL_USES = _uses(frozenset[str]().union(*KNOWN.values()))


class BodyRules:
    """What a deployment accepts: media from ``media_hosts``, and ``extra_fields`` beside known ones."""

    __slots__ = ("extra_fields", "media_hosts")

    def __init__(
        self, media_hosts: frozenset[str] = frozenset(), extra_fields: frozenset[str] = frozenset()
    ) -> None:
        self.media_hosts = media_hosts
        self.extra_fields = extra_fields


class AcceptedBody:
    """A body, and its bytes without the fields that are not known, whose names are ``dropped``."""

    __slots__ = ("body", "dropped", "raw")

    def __init__(self, body: RequestBody, raw: bytes, dropped: list[str]) -> None:
        self.body = body
        self.raw = raw
        self.dropped = dropped


def accept(raw: bytes, route: ProxyRoute, rules: BodyRules) -> AcceptedBody:
    """Decode and check the body of a request, of at most :data:`MAX_DECODED` bytes.

    Raises ``Refused`` naming the parameter.
    """
    path = route.path
    uses = _USES[path]
    fields = _fields_of(raw)
    # Most bodies hold texts alone: of these no part has to be looked at, which would read the texts again.
    plain = "tools" not in fields and lacks_members(raw, HOLDS_MEDIA)
    if not plain:
        _check_depth(raw)
    dropped: list[str] = []
    if not fields.keys() <= uses.keys():
        if len(fields) > MAX_MEMBERS:
            raise Refused(Refusal.BAD_REQUEST, f"The body has more than {MAX_MEMBERS} members.")
        kept: list[tuple[str, Raw]] = []
        for name, value in fields.items():
            if name in uses or name in rules.extra_fields:
                kept.append((name, value))
            else:
                dropped.append(name)
        raw = b"{%b}" % b",".join([b"%b:%b" % (msgspec.json.encode(name), value) for name, value in kept])
        fields = MEMBERS.decode(raw)
    body = _body_of(fields, uses, raw)
    for name in () if plain else WALKED.get(path, ()):
        if (held := fields.get(name)) is not None and memoryview(held)[0] in b"[{":
            media = MediaCheck(name, rules.media_hosts)
            try:
                media.walk(held)
            except ValueError as error:  # of what was skipped before
                raise _not_json(error) from None
            body.media += media.count
            body.defines_tools |= media.tools > 0
    for name in INPUTS.get(path, ()):
        if (found := fields.get(name)) is not None:
            count = body.prompts if name == "prompt" else inputs_of(found)
            body.inputs = max(body.inputs, count)
            if count > MAX_INPUTS:
                raise too_many(name, MAX_INPUTS, count, "inputs")
    if "tools" in fields and body.tools is not ABSENT:
        check_size("tools", body.tools, MAX_TOOLS_BYTES)
        check_tools(ITEMS.decode(body.tools) if memoryview(body.tools)[0] in _LIST else [])
    return AcceptedBody(body, raw, dropped)


async def accept_large(
    raw: bytes, route: ProxyRoute, rules: BodyRules, pieces: JsonPieceReader
) -> AcceptedBody:
    """As :func:`accept`, of a body of any size, which is read in pieces."""
    path = route.path
    spans, dropped = await _spans(raw, pieces), []
    for name in spans:
        if name not in _USES[path] and name not in rules.extra_fields:
            dropped.append(name)
    if dropped:
        raw, spans = _without(raw, spans, dropped)
    body = _large_body(raw, spans, _USES[path])
    for name in WALKED.get(path, ()):
        if name in spans:
            media = MediaCheck(name, rules.media_hosts)
            try:
                await media.walk_large(raw, spans[name], pieces)
            except ValueError as error:  # of names, which were not read before
                raise _not_json(error) from None
            body.media += media.count
            body.defines_tools |= media.tools > 0
    for name in INPUTS.get(path, ()):
        if name in spans:
            body.inputs = max(body.inputs, count := _inputs_at(raw, spans[name]))
            if count > MAX_INPUTS:
                raise too_many(name, MAX_INPUTS, count, "inputs")
    if body.tools is not ABSENT and (tools := spans["tools"]).items:
        check_size("tools", body.tools, MAX_TOOLS_BYTES)
        if tools.items > MAX_TOOLS:
            raise too_many("tools", MAX_TOOLS, tools.items, "tools")
        await pieces.alone(lambda: check_tools(ITEMS.decode(body.tools)))
    return AcceptedBody(body, raw, dropped)


def read(raw: bytes) -> RequestBody:
    """Decode at most :data:`MAX_DECODED` bytes, and check their fields, of any route."""
    fields = _fields_of(raw)
    _check_depth(raw)
    return _body_of(fields, _ALL_USES, raw)


async def read_large(raw: bytes, pieces: JsonPieceReader) -> RequestBody:
    """As :func:`read`, of a body of any size, which is read in pieces."""
    return _large_body(raw, await _spans(raw, pieces), _ALL_USES)


def _fields_of(raw: bytes) -> dict[str, Raw]:
    try:
        fields = _decode_members(raw)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except ValueError as error:
        raise _not_json(error) from None
    except RecursionError:
        raise _too_deep() from None
    return fields


def _check_depth(raw: bytes) -> None:
    if _opens_more_than(raw, MAX_DEPTH) and depth_exceeds(raw, MAX_DEPTH):
        raise _too_deep()


def _body_of(fields: dict[str, Raw], uses: dict[str, int], raw: bytes) -> RequestBody:
    """The body ``raw`` with these ``fields``, which are checked."""
    if len(raw) > MAX_FIELD:
        check_schemas({name: fields[name] for name in SCHEMAS if name in fields and uses.get(name) == _CHECK})
        for name, value in fields.items():
            if name in uses and name not in LONG_FIELDS:
                check_size(name, value)
    for name, value in fields.items():
        if uses.get(name) == _CHECK:
            _check_field(name, value)
    try:
        body = _decode_body(raw) if len(raw) <= SHORT_BYTES else _long_body(fields, uses)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except ValueError as error:
        raise _not_json(error) from None
    body.members = fields
    # By the members, most of which are absent: to read an attribute of a structure costs more.
    if "messages" in fields:
        _check_type("messages", body.messages, _LIST)
    if "tools" in fields:
        _check_type("tools", body.tools, _LIST_OR_NULL)
    if body.n is not None and not 1 <= body.n <= MAX_N:
        raise Refused(Refusal.BAD_REQUEST, f"n must be between 1 and {MAX_N}, got {body.n}.", param="n")
    if body.background:
        raise Refused(Refusal.UNSUPPORTED, "background responses are not supported.", param="background")
    if "prompt" in fields and body.prompt is not ABSENT and len(memoryview(body.prompt)) <= MAX_DECODED:
        body.prompts = inputs_of(body.prompt)
    return body


def _long_body(fields: dict[str, Raw], uses: dict[str, int]) -> RequestBody:
    """The body of these ``fields``, without reading long ones again."""
    decided = [name for name in fields if uses.get(name) == _DECIDE]
    scalars: list[bytes] = []
    for name in decided:
        if name in SCALARS:
            scalars.append(b'"%b":%b' % (name.encode(), bytes(fields[name])))
    body = BODY.decode(b"{%b}" % b",".join(scalars))
    for name in decided:
        if name in RAW_FIELDS:
            setattr(body, name, fields[name])
    return body


def _check_field(name: str, value: Raw) -> None:
    try:
        CHECKS[name](name, value)
    except ValueError as error:  # of what was skipped before
        raise _not_json(error) from None


async def _spans(raw: bytes, pieces: JsonPieceReader) -> dict[str, JsonMember]:
    """Where each member of a body is; of equal names the last counts."""
    if not _OBJECT.match(raw, 0, MAX_GAP_BYTES):
        raise Refused(Refusal.BAD_REQUEST, "The body is not a JSON object.")
    try:
        members = await pieces.members(StructureScan(raw, MAX_DEPTH, MAX_MEMBERS))
    except BoundExceeded as bound:  # mypyc takes two errors of one name for one type
        raise Refused(Refusal.BAD_REQUEST, f"The body {bound}.") from None
    except ValueError as error:
        raise _not_json(error) from None
    return {name_of(member.name): member for member in members}


def _large_body(raw: bytes, spans: dict[str, JsonMember], uses: dict[str, int]) -> RequestBody:
    text = memoryview(raw)
    fields = {name: Raw(text[member.begin : member.end]) for name, member in spans.items()}
    body = _body_of(fields, uses, raw)
    if "prompt" in spans:
        body.prompts = _inputs_at(raw, spans["prompt"])
    return body


def _without(
    raw: bytes, spans: dict[str, JsonMember], dropped: list[str]
) -> tuple[bytes, dict[str, JsonMember]]:
    """``raw`` and its ``spans`` without those ``dropped``, and without members that others override."""
    text, at = memoryview(raw), 0
    parts: list[bytes | memoryview] = []
    kept: dict[str, JsonMember] = {}
    left_out = set(dropped)
    for name, span in spans.items():
        if name not in left_out:
            before = b"%b%b:" % (b"," if kept else b"{", msgspec.json.encode(name))
            parts += [before, text[span.begin : span.end]]
            begin = at + len(before)
            at = begin + span.end - span.begin
            kept[name] = JsonMember(span.name, begin, at, span.items)
    return b"".join([*parts, b"}" if kept else b"{}"]), kept


def _inputs_at(raw: bytes, span: JsonMember) -> int:
    """As :func:`inputs_of`, of the value at ``span``."""
    return span.items if span.items and first_item(raw, span.begin) in b'["{' else 1


def _check_type(name: str, value: Raw, begins: bytes) -> None:
    if value is not ABSENT and memoryview(value)[0] not in begins:
        raise Refused(Refusal.BAD_REQUEST, f"{name} must be a list.", param=name)


def _opens_more_than(raw: bytes, limit: int) -> bool:
    """Whether ``raw`` has over ``limit`` opening brackets; ``find`` is thirty times faster than ``count``."""
    for bracket in (b"[", b"{"):
        at = raw.find(bracket)
        while at >= 0:
            limit -= 1
            if limit < 0:
                return True
            at = raw.find(bracket, at + 1)
    return False


def _too_deep() -> Refused:
    return Refused(Refusal.BAD_REQUEST, f"The body nests deeper than {MAX_DEPTH} levels.")


def _not_json(error: ValueError) -> Refused:
    return Refused(Refusal.BAD_REQUEST, f"The body is not valid JSON: {error}.")


def _invalid(text: str) -> Refused:
    match = _PATH.match(text)
    what, path = (match["what"], match["path"]) if match else (text, None)
    if (missing := _MISSING.match(what)) is not None:
        return Refused(Refusal.BAD_REQUEST, f"{missing['key']} is required.", param=missing["key"])
    where = f"{path}: " if path else "The body: "
    return Refused(Refusal.BAD_REQUEST, f"{where}{what.replace('`', '')}.", param=path or None)
