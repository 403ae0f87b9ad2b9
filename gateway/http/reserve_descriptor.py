"""A descriptor that is kept for the moment when there are no others."""

from __future__ import annotations

import contextlib
import os


class ReserveDescriptor:
    """One descriptor in reserve, from :meth:`keep` to :meth:`give`; each may be called again."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self.keep()

    def keep(self) -> None:
        """Take one if there is one; else the next call does."""
        if self._fd is None:
            with contextlib.suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def give(self) -> bool:
        """Free it for what needs one now; whether there was one."""
        if self._fd is None:
            return False
        os.close(self._fd)
        self._fd = None
        return True
