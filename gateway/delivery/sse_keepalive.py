"""Comments in streams that wait, for a replica or their first event: proxies cut connections that are silent.

The first comment commits the answer to status 200: errors after it are events of the stream. Attempts may go
on, since a comment is no part of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

from gateway.request_context import RequestContext
from policy.config.deployment import GatewayConfig

SWEEP_EVERY_S: Final = 1.0
# Comments in one turn of the event loop: each takes 12 us.
COMMENTS_AT_ONCE: Final = 128


class SseKeepalive:
    """The streams of this worker that may be waiting; each gets a comment every ``sse_keepalive_s``."""

    def __init__(self, limits: Callable[[], GatewayConfig]) -> None:
        self._limits = limits
        self._silent_since: dict[RequestContext, float] = {}

    def watch(self, call: RequestContext, since: float) -> None:
        """Send comments to this call from now on, which came ``since`` then."""
        self._silent_since[call] = since

    def forget(self, call: RequestContext) -> None:
        """The call has ended; it may be unknown."""
        self._silent_since.pop(call, None)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_EVERY_S, self._limits().sse_keepalive_s / 4 or SWEEP_EVERY_S))
            await self.sweep(monotonic())

    async def sweep(self, now: float) -> None:
        """Send the comments that are due, over several turns, and forget the streams that have begun."""
        every_s = self._limits().sse_keepalive_s
        sent = 0
        for call, since in list(self._silent_since.items()):
            if call not in self._silent_since:  # it has ended in the meantime
                continue
            if not call.waits:
                del self._silent_since[call]
            elif every_s and now - since >= every_s:
                self._silent_since[call] = now
                call.comment()
                sent += 1
                if sent % COMMENTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
