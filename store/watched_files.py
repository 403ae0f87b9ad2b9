"""Files that are read again when they have changed, by polling: on every file system and through renames."""

from __future__ import annotations

import os
from pathlib import Path

Signature = tuple[int, int, int]


def signature_of(path: str | Path) -> Signature | None:
    """The time of the last change, the inode and the size of a file; ``None`` if it cannot be found."""
    try:
        found = os.stat(path)  # noqa: PTH116 - many are looked at several times a second
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


class WatchedFiles:
    """Some files, none of which was read yet.

    They are read after :meth:`changed`, and then :meth:`were_read`: what changes meanwhile is read again.
    """

    def __init__(self, *paths: str | Path) -> None:
        self._paths = paths
        self._seen: tuple[Signature | None, ...] = ()
        self._read: tuple[Signature | None, ...] | None = None

    def changed(self) -> bool:
        """Whether any file was changed, replaced, added or removed since they were read, or none was read."""
        self._seen = tuple([signature_of(path) for path in self._paths])
        return self._seen != self._read

    def were_read(self) -> None:
        """The files are read as :meth:`changed` saw them."""
        self._read = self._seen
