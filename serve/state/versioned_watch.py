"""A version number that grows with each change, and readers that wait for the next one."""

from __future__ import annotations

import asyncio
import contextlib
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
        self._sent = asyncio.Event()
        # By reader: the last version that was written to its connection.
        self._readers: dict[object, int] = {}

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

    async def delivered(self, timeout_s: float) -> bool:
        """Wait until the version of now was written to every reader; ``False`` after ``timeout_s``."""
        number = self.number
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(sent < number for sent in self._readers.values()):
                    self._sent.clear()
                    await self._sent.wait()
                return True
        return False

    async def stream(self, line: Callable[[], Awaitable[tuple[int, bytes]]]) -> AsyncIterator[bytes]:
        """``line``, a version and its encoding, now, after each change and at least once a second."""
        reader = object()
        self._readers[reader] = 0
        try:
            while True:
                number, encoded = await line()
                yield encoded
                self._readers[reader] = number
                self._sent.set()
                await asyncio.sleep(COALESCE_S)
                await self.past(number, HEARTBEAT_S - COALESCE_S)
        finally:
            del self._readers[reader]
            self._sent.set()
