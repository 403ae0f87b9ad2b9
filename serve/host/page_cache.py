"""Which weights a node has started before, since it came up: what its page cache may still hold."""

from __future__ import annotations

import contextlib
from pathlib import Path

from store.state_dir import own_directory, private_directory


def was_read_before(digest: str) -> bool:
    """Whether an engine with these weights was ready on this node since the node came up."""
    try:
        return (_directory() / digest).exists()
    except OSError:
        return False


def record_read(digest: str) -> None:
    """An engine with these weights is ready; a node that cannot keep that starts cold each time."""
    with contextlib.suppress(OSError):
        (_directory() / digest).touch()


def _directory() -> Path:
    return own_directory(private_directory() / "started")
