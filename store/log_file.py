"""A log file that is rotated by size, written by one process."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

MAX_BYTES = 16 * 1024 * 1024
KEPT = 2


class RotatingLog:
    """Append bytes to ``path``; past ``max_bytes`` it becomes ``path.1``, and ``KEPT`` are kept."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append ``data``, rotating first when it would not fit."""
        if self._file.tell() + len(data) > self._max_bytes:
            self._rotate()
        left = memoryview(data)
        while left:
            # A nearly full disk takes part of it, and fails the next write.
            left = left[self._file.write(left) :]

    @property
    def descriptor(self) -> int:
        """The descriptor, for a child that writes itself; the file is not rotated then."""
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    async def pump(self, source: asyncio.StreamReader) -> None:
        """Copy ``source`` to its end; a full disk drops data instead of blocking the writer."""
        while data := await source.read(65_536):
            with contextlib.suppress(OSError):
                self.write(data)

    def _rotate(self) -> None:
        for index in range(KEPT, 0, -1):
            older = self._path if index == 1 else self._numbered(index - 1)
            if older.exists():
                older.replace(self._numbered(index))
        # The former file is closed last: without a new one, the next write tries again.
        opened = self._path.open("ab", buffering=0)
        self._file.close()
        self._file = opened

    def _numbered(self, index: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{index}")
