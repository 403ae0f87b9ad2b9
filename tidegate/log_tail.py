"""Read log files from their end, and follow them as they grow and rotate."""

from __future__ import annotations

import os
from pathlib import Path

from store.log_file import KEPT
from tidegate.log_entries import LEVELS, LogEntry, entries

_BLOCK_BYTES = 1024 * 1024


def tail(path: Path, lines: int | None, *, since: float = 0.0, level: str = LEVELS[0]) -> list[LogEntry]:
    """The last ``lines`` entries of a log and its rotated files (``None``: all), oldest first.

    Only those from the instant ``since`` on, and of ``level`` or above.
    """
    found: list[LogEntry] = []
    for file in (path, *(path.with_name(f"{path.name}.{i}") for i in range(1, KEPT + 1))):
        size = _BLOCK_BYTES
        while (read := _read_end(file, size)) is not None:
            lines_read, written_at, rest = read
            block = entries(path.stem, lines_read, written_at)
            wanted = [entry for entry in block if entry.at >= since and is_at_least(entry, level)]
            enough = lines is not None and len(wanted) + len(found) >= lines
            older = bool(block) and block[0].at < since
            if enough or older or not rest:
                found = wanted + found
                break
            size *= 8
        if read is None or enough or older:
            break
    return found if lines is None else found[max(0, len(found) - lines) :]


def is_at_least(entry: LogEntry, level: str) -> bool:
    return LEVELS.index(entry.level) >= LEVELS.index(level)


def _read_end(path: Path, max_bytes: int) -> tuple[list[str], float, bool] | None:
    """The last whole lines within ``max_bytes``, when the last was written, and whether others precede.

    ``None`` if there is no file.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            if size > max_bytes:
                file.readline()  # a part of a line
            lines = file.read().removesuffix(b"\n").split(b"\n")
            found = [line.decode(errors="replace") for line in lines if line or len(lines) > 1]
            return found, os.fstat(file.fileno()).st_mtime, size > max_bytes
    except FileNotFoundError:
        return None


class LogFollower:
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
