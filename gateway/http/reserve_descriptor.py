"""A reserved file descriptor, for when the process has reached its limit."""

from __future__ import annotations

import contextlib
import os


class ReserveDescriptor:
    """One descriptor in reserve, from :meth:`keep` to :meth:`give`; each may be called again."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self.keep()

    def keep(self) -> None:
        """Reserve a descriptor, if one is available; otherwise a later call does."""
        if self._fd is None:
            with contextlib.suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def give(self) -> bool:
        """Free the descriptor; returns whether there was one."""
        if self._fd is None:
            return False
        os.close(self._fd)
        self._fd = None
        return True
