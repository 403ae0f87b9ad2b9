"""uvicorn inside a process that handles signals itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn


class UvicornServer(uvicorn.Server):
    """Leaves signals to the process around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing."""
        yield
