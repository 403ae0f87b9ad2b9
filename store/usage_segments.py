"""The files in which gateway workers record the usage of requests, until the ledger has it.

A segment is a header of :data:`HEADER_WORDS` words (a magic number, the number of slots), slots of
:data:`policy.tenancy.usage_slot.WORDS`, and the dimensions that slots name, a JSON line each, followed by
zeros. Header and slots are mapped. Its worker holds the file's lock while it lives.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_left
from pathlib import Path
from typing import Final

import msgspec

from policy.tenancy.usage_slot import WORDS, UsageDims, UsageRecord, read_record

SEGMENT_SUFFIX = ".usage"
HEADER_WORDS: Final = 8
# Slots of a segment, 512 KiB, and the room for dimensions that is allocated at a time.
SLOTS: Final = 8191
DIMS_BYTES: Final = 64 * 1024
# Another version must not be read as this one.
MAGIC: Final = 0x7469646575736501
_decode_dims = msgspec.json.Decoder(UsageDims).decode


class SegmentReader:
    """A segment of another process, which is never written. Raises :class:`OSError`.

    ``drained`` has a bit for each slot that the ledger has; ``abandoned`` is set once its writer has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            head = os.pread(self._file, 16, 0)
            self.slots = int.from_bytes(head[8:], "little") if _is_segment(head) else 0
            self._size = 8 * (HEADER_WORDS + self.slots * WORDS)
            if os.fstat(self._file).st_size < self._size or not self.slots:
                raise OSError(f"{path} is no segment of this version")
            mapped = mmap.mmap(self._file, self._size, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(self._file)
            raise
        self._words = memoryview(mapped).cast("Q")
        self._dims: list[UsageDims] = []
        self.drained = self.empty_bitmap()
        self.abandoned = False

    def empty_bitmap(self) -> bytearray:
        """The bitmap of a segment of which the ledger has nothing."""
        return bytearray((self.slots + 7) // 8)

    def look(self) -> None:
        """Find out whether its writer has ended; its last words are read after that."""
        if not self.abandoned:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            self.abandoned = True

    def final(self, most: int) -> list[tuple[int, UsageRecord]]:
        """At most ``most`` slots that stay as they are and are not drained, with their numbers."""
        words, drained, abandoned, found = self._words, self.drained, self.abandoned, []
        for slot in range(self.slots):
            if drained[slot >> 3] == 0xFF:
                continue
            place = HEADER_WORDS + slot * WORDS
            state = words[place]
            if not state:
                if abandoned:
                    continue  # after a power failure pages before others may be lost
                break
            if drained[slot >> 3] >> (slot & 7) & 1:
                continue
            record = read_record(state, words[place : place + WORDS], abandoned=abandoned)
            if record is not None:
                found.append((slot, record))
                if len(found) >= most:
                    break
        return found

    def waiting(self) -> int:
        """How many slots were taken and are not drained, open ones included."""
        words = self._words
        used = bisect_left(range(self.slots), 1, key=lambda slot: words[HEADER_WORDS + slot * WORDS] == 0)
        return used - sum(byte.bit_count() for byte in self.drained)

    def dims(self, number: int) -> UsageDims | None:
        """The dimensions with this number; ``None`` if they were lost, as by a power failure."""
        if number >= len(self._dims):
            size = os.fstat(self._file).st_size
            lines = os.pread(self._file, size - self._size, self._size).partition(b"\0")[0].split(b"\n")
            try:
                self._dims = [_decode_dims(line) for line in lines[:-1]]
            except ValueError:
                return None
        return self._dims[number] if number < len(self._dims) else None

    def close(self) -> None:
        os.close(self._file)


def _is_segment(head: bytes) -> bool:
    return int.from_bytes(head[:8], "little") == MAGIC
