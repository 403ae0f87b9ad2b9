"""The structure of JSON text: its depth, its items, and the members of a large value.

A large value is read in pieces, one per turn of the event loop, and nothing of its size is allocated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

# The most levels of a body.
MAX_DEPTH: Final = 64
PLAIN_DEPTH: Final = 6
# Read in one turn of the event loop: 2 ms at most, 10 without machine code.
PIECE_BYTES: Final = 64 * 1024
# Where a piece could end; no sensible JSON has neither a comma nor a string in so many bytes.
MAX_GAP_BYTES: Final = 64 * 1024
# Within so many bytes the end of a string is looked for byte by byte, which is cheaper than two searches.
_NEAR: Final = 16
_MAX_NAME: Final = 256
# Bytes outside of strings that are looked at, and as how many of them the end of a string counts.
_PLAIN_STEPS: Final = 4096
_QUOTE_STEPS: Final = 8

_BLANK: Final = 0x20
_NO_ASCII: Final = 0x80
_QUOTE: Final = 0x22
_COMMA: Final = 0x2C
_COLON: Final = 0x3A
_BACKSLASH: Final = 0x5C
# Brackets of lists and objects differ in this bit: with it they are those of objects.
_KIND: Final = 0x20
_OPEN_LIST: Final = 0x5B
_CLOSE_LIST: Final = 0x5D
_OPEN: Final = 0x7B
_CLOSE: Final = 0x7D
_ESCAPE: Final = 6  # bytes of one with four hexadecimal digits
_SPACE: Final = b" \t\r\n"
# The first escape of a surrogate pair.
_HIGH: Final = re.compile(rb"\\u[dD][89abAB]")
_syntax: Final = msgspec.json.Decoder(msgspec.Raw)


class BoundExceeded(ValueError):
    """Valid or not, the value has more of something than is accepted; the message says what."""


class JsonMember(NamedTuple):
    """A member of an object, its name as written, or an item of an array, without a name.

    The value is at ``begin`` to ``end``; ``items`` is their number if it is an array.
    """

    name: bytes
    begin: int
    end: int
    items: int


def name_of(written: bytes) -> str:
    """The name of a member; empty if it is invalid, or so long that it was not kept."""
    try:
        if b"\\" in written:
            return msgspec.json.decode(b'"%b"' % written, type=str)
        return str(written, "utf-8")
    except ValueError:
        return ""


def depth_exceeds(raw: bytes, limit: int) -> bool:
    """Whether valid JSON nests deeper than ``limit``."""
    at, end, depth = 0, len(raw), 0
    while 0 <= at < end:
        byte = raw[at]
        at += 1
        if byte == _QUOTE:
            at = _string_end(raw, at, end)
        elif byte | _KIND == _OPEN:
            depth += 1
            if depth > limit:
                return True
        elif byte | _KIND == _CLOSE:
            depth -= 1
    return False


def lacks_members(raw: bytes, names: frozenset[bytes]) -> bool:
    """Whether valid JSON has no member of ``names``, and nests at most :data:`PLAIN_DEPTH` levels.

    False also where this is not found out fast: in far less than the time of a pass that decodes all of it.
    """
    at, end, depth, steps = 0, len(raw), 0, _PLAIN_STEPS + (len(raw) >> 6)
    while at < end:
        byte = raw[at]
        at += 1
        steps -= 1
        if byte == _QUOTE:
            begin, near = at, min(at + _NEAR, end)
            while at < near and raw[at] != _QUOTE and raw[at] != _BACKSLASH:
                at += 1
            at = at + 1 if raw[at] == _QUOTE else raw.find(_QUOTE, at) + 1
            while raw[at - 2] == _BACKSLASH and _backslashes(raw, begin, at - 1) % 2 and steps > 0:
                at = raw.find(_QUOTE, at) + 1
                steps -= _QUOTE_STEPS
            steps -= _QUOTE_STEPS
            if (
                depth > 1
                and _is_name(raw, at, end)
                and (
                    at - begin > _MAX_NAME
                    or not _is_plain(raw, begin, at - 1)
                    or raw[begin : at - 1] in names
                )
            ):
                return False
        elif byte | _KIND == _OPEN:
            depth += 1
            if depth > PLAIN_DEPTH:
                return False
        elif byte | _KIND == _CLOSE:
            depth -= 1
        if steps <= 0:
            return False
    return True


def _is_name(raw: bytes, at: int, end: int) -> bool:
    """Whether a colon follows the string that ends ``at``."""
    while at < end and raw[at] <= _BLANK:
        at += 1
    return at < end and raw[at] == _COLON


def _is_plain(raw: bytes, begin: int, end: int) -> bool:
    """Whether a name is ASCII without escapes."""
    while begin < end:
        if raw[begin] == _BACKSLASH or raw[begin] >= _NO_ASCII:
            return False
        begin += 1
    return True


class StructureScan:
    """One pass over ``raw`` from ``begin`` to ``end``, an object or array: checks it and finds its members.

    msgspec checks each piece, completed at both ends by what stands for the rest. A piece ends behind a comma
    or within a string.
    """

    def __init__(
        self,
        raw: bytes,
        max_depth: int,
        max_members: int,
        *,
        begin: int = 0,
        end: int | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.members: list[JsonMember] = []
        self._raw = raw
        self._max_depth = max_depth
        self._max_members = max_members
        self._piece_bytes = piece_bytes
        self._at = begin
        self._end = len(raw) if end is None else end
        self._before = b""  # stands for all earlier pieces
        self._in_string = False
        self._opened = begin
        self._depth = 0
        self._objects = 0  # a bit for each open bracket, 1 for an object; the innermost is the lowest
        self._last = 0  # the last comma, colon or bracket
        self._name = b""
        self._value = -1  # where the current member's value begins
        self._commas = 0  # between its items

    def advance(self) -> bool:
        """Read the next piece; returns whether it was the last. Raises ``ValueError`` for invalid JSON."""
        raw, begin, end = self._raw, self._at, self._end
        enough = min(begin + self._piece_bytes, end)
        most = min(enough + MAX_GAP_BYTES, end)
        depth, objects, last = self._depth, self._objects, self._last
        in_string, cut = self._in_string, False
        # Where the current string begins, and the part of it in this piece.
        opened, text = self._opened, begin
        at = begin
        while at < most and not cut:
            if not in_string:
                byte = raw[at]
                at += 1
                if byte != _QUOTE:
                    if depth == 1 and (byte == _COMMA or byte | _KIND == _CLOSE):
                        self._end_member(at - 1)
                    if byte == _COMMA:
                        self._commas += depth == 2
                        cut = at >= enough
                    elif byte | _KIND == _OPEN:
                        depth += 1
                        objects = objects * 2 + (byte == _OPEN)
                        if depth > self._max_depth:
                            raise BoundExceeded(f"nests deeper than {self._max_depth} levels")
                    elif byte | _KIND == _CLOSE:
                        depth -= 1
                        objects //= 2
                    elif byte != _COLON:
                        continue
                    last = byte
                    if depth == 1 and byte | _KIND != _CLOSE:
                        self._value = at
                    continue
                opened = text = at
            at = _string_end(raw, text, max(text, enough))
            in_string = cut = at < 0
            if in_string:
                at = _string_cut(raw, text, max(text, enough))
            elif depth == 1 and objects and last != _COLON:
                self._name = raw[opened : at - 1] if at - opened <= _MAX_NAME else b""
        if at >= end or (in_string and enough == end):
            self._check(begin, end, b"")
            return True
        if not cut or depth < 1:
            raise ValueError(f"no comma and no string before byte {at}")
        self._at, self._depth, self._objects, self._last = at, depth, objects, last
        self._in_string, self._opened = in_string, opened
        self._cut(begin)
        return False

    def _cut(self, begin: int) -> None:
        """Check the piece from ``begin`` on; what follows takes over its open brackets."""
        objects, levels = self._objects, range(self._depth)
        opening = b"".join([b'{"":' if objects >> level & 1 else b"[" for level in reversed(levels)])
        closing = b"".join([b"}" if objects >> level & 1 else b"]" for level in levels])
        if not self._in_string:
            ended, begun = (b'"":0' if objects & 1 else b"0"), opening + b"0,"
        elif objects & 1 and self._last != _COLON:  # within a name
            ended, begun = b'":0', opening.removesuffix(b'"":') + b'"'
        else:
            ended, begun = b'"', opening + b'"'
        self._check(begin, self._at, ended + closing)
        self._before = begun

    def _end_member(self, end: int) -> None:
        raw, begin = self._raw, self._value
        while begin < end and raw[begin] in _SPACE:
            begin += 1
        while begin < end and raw[end - 1] in _SPACE:
            end -= 1
        if begin < end:
            if len(self.members) == self._max_members:
                raise BoundExceeded(f"has more than {self._max_members} members")
            self.members.append(JsonMember(self._name, begin, end, _items(raw, begin, end, self._commas)))
        self._name, self._commas = b"", 0

    def _check(self, begin: int, end: int, after: bytes) -> None:
        """Raise ``ValueError`` unless the piece is valid between what stands for the rest."""
        try:
            _syntax.decode(b"".join((self._before, memoryview(self._raw)[begin:end], after)))
        except msgspec.DecodeError as error:
            what = str(error).partition(" (byte ")[0]
            raise ValueError(f"{what} (between bytes {begin} and {end})") from None


class JsonPieceReader:
    """Reads large values, one piece of one of them in each turn of the event loop, each in its turn.

    Between two pieces of different values is a turn without any.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def members(self, scan: StructureScan) -> list[JsonMember]:
        """The members of a whole value; raises ``ValueError`` for invalid JSON."""
        while True:
            async with self._turn:
                if scan.advance():
                    return scan.members
                await asyncio.sleep(0)

    async def pause(self) -> None:
        """Let other tasks go first, of those that read pieces one."""
        async with self._turn:
            await asyncio.sleep(0)

    async def alone(self, check: Callable[[], None]) -> None:
        """Call ``check``, which takes some milliseconds, in a turn without pieces of others."""
        async with self._turn:
            check()
            await asyncio.sleep(0)


def _string_end(raw: bytes, at: int, end: int) -> int:
    """Behind the quote that ends the string which is open at ``at``; -1 if it does not end before ``end``."""
    quote = -1
    while at < end:
        near = min(at + _NEAR, end)
        while at < near:
            byte = raw[at]
            at += 1
            if byte == _QUOTE:
                return at
            if byte == _BACKSLASH:
                at += 1
                near = min(at + _NEAR, end)
        gap = _NEAR
        while gap >= _NEAR and at < end:
            if quote < at and (quote := raw.find(_QUOTE, at, end)) < 0:
                quote = end
            escape = raw.find(_BACKSLASH, at, quote)
            if escape < 0:
                return quote + 1 if quote < end else -1
            gap, at = escape - at, escape + 2
    return -1


def _string_cut(raw: bytes, begin: int, at: int) -> int:
    """The last place up to ``at`` where a string that is open at ``begin`` can be cut.

    That is in no escape, nor between the two of a surrogate pair.
    """
    at -= _backslashes(raw, begin, at) % 2
    escape = raw.rfind(b"\\u", max(begin, at - _ESCAPE), at)
    if escape >= 0 and _backslashes(raw, begin, escape) % 2 == 0:
        if escape + _ESCAPE > at:
            at, escape = escape, escape - _ESCAPE
        if escape >= begin and _HIGH.match(raw, escape) and _backslashes(raw, begin, escape) % 2 == 0:
            at = escape
    return at


def _backslashes(raw: bytes, begin: int, at: int) -> int:
    """How many of them precede ``at`` without a gap, from ``begin`` on."""
    first = at
    while first > begin and raw[first - 1] == _BACKSLASH:
        first -= 1
    return at - first


def _items(raw: bytes, begin: int, end: int, commas: int) -> int:
    """How many items the value from ``begin`` to ``end`` has, an array with ``commas`` between them."""
    if commas or raw[begin] != _OPEN_LIST:
        return commas + 1 if raw[begin] == _OPEN_LIST else 0
    begin += 1
    while begin < end and raw[begin] in _SPACE:
        begin += 1
    return 1 if begin < end and raw[begin] != _CLOSE_LIST else 0
