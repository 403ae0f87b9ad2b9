"""Read log files from their end, and follow them as they grow and rotate."""

from __future__ import annotations

import os
from pathlib import Path


def tail(path: Path, lines: int, max_bytes: int = 1024 * 1024) -> list[str]:
    """The last ``lines`` lines within the last ``max_bytes``; none for a missing file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-lines:] if lines > 0 else []


class Follower:
    """Lines added to ``path`` from now on, or from its start if ``whole``, across rotations."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path = path
        self._file = path.open("rb")
        if not whole:
            self._file.seek(0, 2)
        self._partial = b""

    def lines(self) -> list[str]:
        """The lines added since the last call."""
        data = self._partial + self._file.read()
        if self._rotated():
            self._file.close()
            self._file = self._path.open("rb")
            data += self._file.read()
        *complete, self._partial = data.split(b"\n")
        return [line.decode(errors="replace") for line in complete]

    def close(self) -> None:
        self._file.close()

    def _rotated(self) -> bool:
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False
