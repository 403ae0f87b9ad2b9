"""uvicorn inside a process that handles signals itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn

# How often the date in the heads of answers changes.
DATE_EVERY_S = 1.0


class UvicornServer(uvicorn.Server):
    """Leaves signals to the process around it, and wakes once a second: uvicorn's own wakes ten times.

    It ends when ``should_exit`` is set.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        self._ending = asyncio.Event()
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        return self._ending.is_set()

    @should_exit.setter
    def should_exit(self, ends: bool) -> None:
        # uvicorn sets it to false once, as it begins.
        if ends:
            self._ending.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing."""
        yield

    async def main_loop(self) -> None:
        # uvicorn renews the date at its tick 0.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_EVERY_S):
                    await self._ending.wait()
