"""A version number that grows with each change, and readers that wait for the next one."""

from __future__ import annotations

import asyncio

from serve.threads import wait_at_most


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
