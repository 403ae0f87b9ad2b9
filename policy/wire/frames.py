"""Frames: the requests and responses of many streams on one connection from a gateway worker to a replica.

The gateway opens with :func:`preface`, to which the replica answers :data:`ACCEPTED`. Then both send frames::

    frame   length u32 (of what follows it), sequence u32, records
    record  kind u8, stream u32, size u32, payload

Numbers are big-endian. A stream is one request, numbered from 1 by the gateway; a number is used once. What
one side writes in a turn of its event loop leaves together: so a replica sends the tokens that a step of its
engine gave to all streams in one frame, or in several if they are over :data:`FULL_FRAME` bytes. HTTP's words
stay: the head of a request is that of HTTP/1.1, and the replica's load stream is a stream among the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

VERSION: Final = 1
# What an HTTP server takes for a request with an unknown method: an older replica answers 400 and closes.
MAGIC: Final = b"TIDEGATE-FRAMES "
ACCEPTED: Final = b"TIDEGATE-FRAMES 1\r\n"
MAX_PREFACE: Final = 4096

# From the gateway: a request's head, a part of its body, bytes that the replica may send further on a stream
# (u32), the end of its interest.
REQUEST: Final = 1
BODY: Final = 2
WINDOW: Final = 3
CANCEL: Final = 4
# From the replica: status (u16) and header lines, a part of the body, the last part, a response that broke.
HEAD: Final = 5
DATA: Final = 6
END: Final = 7
RESET: Final = 8

# Bytes of a response's body that a replica may send before the gateway allows more: a client that does not
# read holds so much of a worker's memory, and holds up nobody else.
WINDOW_BYTES: Final = 64 * 1024
# Longest payload of one record, so that one stream delays the others on its connection by so much at most.
MAX_PAYLOAD: Final = 64 * 1024
# Longest frame that is taken, and the size at which one is closed: the tokens in it, less than a hundred, are
# handled in one turn of a worker's event loop.
MAX_FRAME: Final = 128 * 1024
FULL_FRAME: Final = 16 * 1024

_LENGTHS: Final = Struct(">II")
_RECORD: Final = Struct(">BII")
_STATUS: Final = Struct(">H")
_CREDIT: Final = Struct(">I")
_SEQUENCES: Final = 1 << 32

Record = tuple[int, int, bytes]


class BrokenFrames(ValueError):
    """The other side does not keep to the format; its connection must be closed."""


def preface(secret: str) -> bytes:
    """The first bytes of a connection: the version, and the secret that admits a gateway."""
    return b"%b%d %b\r\n" % (MAGIC, VERSION, secret.encode())


def credit(size: int) -> bytes:
    """The payload of a :data:`WINDOW` record."""
    return _CREDIT.pack(size)


def credit_of(payload: bytes) -> int:
    """What :func:`credit` wrote; raises :class:`BrokenFrames`."""
    if len(payload) != _CREDIT.size:
        raise BrokenFrames(f"a window of {len(payload)} bytes; expected {_CREDIT.size}")
    return int(_CREDIT.unpack(payload)[0])


def head(status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The payload of a :data:`HEAD` record."""
    return _STATUS.pack(status) + b"".join([b"%b: %b\r\n" % pair for pair in headers])


def head_of(payload: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers, names in lower case; of repeated ones the last. Raises :class:`BrokenFrames`."""
    if len(payload) < _STATUS.size:
        raise BrokenFrames("a response's head without a status")
    return int(_STATUS.unpack_from(payload)[0]), dict(header_lines(payload[_STATUS.size :]))


def header_lines(text: bytes) -> list[tuple[bytes, bytes]]:
    """The headers in ``text``, one a line, names in lower case; raises :class:`BrokenFrames`."""
    headers = []
    for line in text.split(b"\r\n"):
        if line:
            name, colon, value = line.partition(b":")
            if not colon:
                raise BrokenFrames("a header without a colon")
            headers.append((name.lower(), value.strip()))
    return headers


class FrameEncoder:
    """Collects records into frames. ``empty``: none is waiting."""

    def __init__(self) -> None:
        self._sequence = 0
        self._records: list[bytes] = []
        self._size = 0
        self._frames: list[bytes] = []

    @property
    def empty(self) -> bool:
        return not (self._records or self._frames)

    def add(self, kind: int, stream: int, payload: bytes) -> None:
        """A record of at most :data:`MAX_PAYLOAD` bytes, after all others."""
        size = _RECORD.size + len(payload)
        if self._size and self._size + size > FULL_FRAME:
            self._seal()
        self._records.append(_RECORD.pack(kind, stream, len(payload)))
        self._records.append(payload)
        self._size += size

    def take(self) -> bytes:
        """All that was added, as frames."""
        if self._records:
            self._seal()
        frames, self._frames = self._frames, []
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def alone(self, kind: int, stream: int, size: int) -> bytes:
        """What precedes a payload of ``size`` bytes as a frame of its own; nothing else may be waiting."""
        return self._lengths(_RECORD.size + size) + _RECORD.pack(kind, stream, size)

    def _seal(self) -> None:
        self._frames.append(self._lengths(self._size) + b"".join(self._records))
        self._records, self._size = [], 0

    def _lengths(self, size: int) -> bytes:
        sequence, self._sequence = self._sequence, (self._sequence + 1) % _SEQUENCES
        return _LENGTHS.pack(size + 4, sequence)


class FrameDecoder:
    """The records of what arrives, in any pieces.

    ``broken``: what arrived beyond the records that were given is no frame, and nothing more can be read.
    """

    def __init__(self) -> None:
        self.broken: BrokenFrames | None = None
        self._sequence = 0
        self._rest = b""
        # How many bytes at the beginning of the rest are of a frame whose first records were given.
        self._begun = 0

    def feed(self, data: bytes, most: int = MAX_FRAME) -> list[Record]:
        """At most so many records of the frames that ``data`` completes, as kind, stream and payload.

        If there are as many, more may be ready, and come with the next call, of no data perhaps. Never
        raises: the records before a break count however the network cut the bytes. Take them, then
        :meth:`check`.
        """
        if self.broken is not None:
            return []
        if self._rest:
            data = self._rest + data
        records: list[Record] = []
        at, have, end = 0, len(data), self._begun
        while len(records) < most:
            if at == end:
                if have - at < 8:
                    break
                length, sequence = _LENGTHS.unpack_from(data, at)
                if not 4 <= length <= MAX_FRAME + 4:
                    self.broken = BrokenFrames(f"a frame of {length} bytes; expected 4 to {MAX_FRAME + 4}")
                    break
                if sequence != self._sequence:
                    self.broken = BrokenFrames(f"frame {sequence} came; expected {self._sequence}")
                    break
                if at + 4 + length > have:
                    break
                self._sequence = (sequence + 1) % _SEQUENCES
                end = at + 4 + length
                at += 8
                continue
            if end - at < 9:
                self.broken = BrokenFrames("a record is cut at the end of its frame")
                break
            kind, stream, size = _RECORD.unpack_from(data, at)
            at += 9
            if size > end - at:
                self.broken = BrokenFrames(f"a record of {size} bytes in a frame with {end - at} left")
                break
            records.append((kind, stream, data[at : at + size]))
            at += size
        self._begun = end - at
        self._rest = data[at:]
        return records

    def check(self) -> None:
        """Raise :class:`BrokenFrames` if it is ``broken``."""
        if self.broken is not None:
            raise self.broken
