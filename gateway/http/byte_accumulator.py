"""Joins the parts of a body or answer as they arrive: a long one is in memory once, never copied whole."""

from __future__ import annotations

from io import BytesIO
from typing import Final

# From this size on a block is mapped (gateway.worker_main): pages that are not written take no memory, and it
# is the kernel's again when it is freed. Room for the whole length is made when a part of it has come: a
# client that sends little takes little memory, and a thousand that leave do so before the heap is in pieces.
LARGE_BYTES: Final = 1024 * 1024
ROOM_FROM: Final = 64 * 1024


class ByteAccumulator:
    """``size`` bytes that have arrived."""

    def __init__(self) -> None:
        self.size = 0
        self._only = b""
        self._whole: BytesIO | None = None
        self._has_room = False

    def add(self, part: bytes, length: int) -> None:
        """``length`` is that of all parts, 0 if it is not known."""
        before, self.size = self.size, self.size + len(part)
        if not before:
            self._only = part
            return
        whole = self._whole
        if whole is None:
            whole = self._whole = BytesIO()
            whole.write(self._only)
            self._only = b""
        if not self._has_room and self.size >= ROOM_FROM and length >= LARGE_BYTES and length > self.size:
            self._has_room = True
            self._whole = BytesIO(bytes(length))
            self._whole.write(whole.getbuffer())
            whole = self._whole
        whole.write(part)

    def take(self) -> bytes:
        """All that arrived, which is forgotten here."""
        whole = self._only if self._whole is None else self._whole.getvalue()
        if len(whole) > self.size:  # fewer than expected
            whole = whole[: self.size]
        self.clear()
        return whole

    def clear(self) -> None:
        self.size, self._only, self._whole, self._has_room = 0, b"", None, False
