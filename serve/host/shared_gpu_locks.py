"""Locks of GPUs: one file for each, so that engines that share a GPU never use it at the same time.

A lock belongs to an open file, which the engine's process inherits. So it is released when the host unlocks
it, or once both the host and its engine are gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path


class GpuLocks:
    """The locks of the GPUs of one engine, taken together."""

    def __init__(self, folder: Path, gpus: Sequence[str]) -> None:
        """``gpus`` are names as in ``CUDA_VISIBLE_DEVICES``; raises ``OSError``."""
        self.descriptors = tuple(open_lock(folder / f"gpu-{gpu}.lock") for gpu in gpus)

    def try_lock(self) -> bool:
        """Take all; returns false, with none taken, if another engine has one."""
        for descriptor in self.descriptors:
            if not try_lock(descriptor):
                self.unlock()
                return False
        return True

    def unlock(self) -> None:
        """Release all."""
        for descriptor in self.descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files; an engine that inherited them keeps its locks."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def open_lock(path: Path) -> int:
    """A file to lock; raises ``OSError``."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Whether the file could be locked at once; one that has it already keeps it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    return False
