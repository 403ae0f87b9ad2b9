"""A version number that grows with each change, and readers that wait for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from serve.async_waiting import wait_at_most

# A stream has a line at least this often, so that both ends notice a broken connection.
HEARTBEAT_S = 1.0
# Changes within this many seconds are sent as one line.
COALESCE_S = 0.05


class Revision:
    """The version of a document that is streamed; it begins at 1."""

    def __init__(self) -> None:
        self.number = 1
        self._changed = asyncio.Event()

    def bump(self) -> None:
        """Count a change and wake all readers."""
        self.number += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Return at the next change."""
        await self._changed.wait()

    async def past(self, number: int, timeout_s: float) -> None:
        """Return when the version is past ``number``, or after ``timeout_s``."""
        if self.number <= number:
            await wait_at_most(self._changed, timeout_s)

    async def stream(self, line: Callable[[], Awaitable[tuple[int, bytes]]]) -> AsyncIterator[bytes]:
        """``line``, a version and its encoding, now, after each change and at least once a second."""
        while True:
            number, encoded = await line()
            yield encoded
            await asyncio.sleep(COALESCE_S)
            await self.past(number, HEARTBEAT_S - COALESCE_S)
