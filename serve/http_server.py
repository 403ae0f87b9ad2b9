"""The HTTP server of internal ports: uvicorn without its own signal handling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn


class HttpServer(uvicorn.Server):
    """Leaves signals to the process around it, which closes what it owns before it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing."""
        yield
