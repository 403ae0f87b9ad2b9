"""When a file is saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Two looks that agree make a save: an editor writes in pieces, or puts another file in its place.
POLL_S = 0.2


def saves(path: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Yield once for the file as it is, and again whenever it was saved and came to rest.

    It is looked at rather than subscribed to, which works on every file system and through a renamed file.
    """
    told = seen = None
    while True:
        now = _signature(path)
        if now is not None and now == seen and now != told:
            told = now
            yield
        seen = now
        sleep(POLL_S)


def _signature(path: Path) -> tuple[int, int, int] | None:
    """What another content has another of; ``None`` while there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
