"""How much of a measured time the machine itself has taken, so that a limit is of the gateway alone."""

from __future__ import annotations

import asyncio
import contextlib

EVERY_S = 0.01
# An idle machine wakes a sleeper so much late.
USUAL_S = 0.01


class Stalls:
    """While it runs, ``seconds`` is the sum of what this loop woke too late; on an idle machine, nothing."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch, in the running loop."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Watch no more."""
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            late = loop.time() - due
            if late > USUAL_S:
                self.seconds += late
