"""A request's part in an adapter, from before the engine sees the request until it is done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serve.engine.adapters.slots import AdapterSlot


class AdapterLease:
    """What a request holds, and must release.

    ``arrival`` is ``None`` if the engine may see the request at once. Else it is done when it may, with the
    instant of that, or with :class:`policy.errors.AdapterRefused` or :class:`policy.errors.EngineFailed`.
    """

    def __init__(
        self,
        adapter: AdapterSlot,
        arrival: asyncio.Future[float] | None,
        at: float,
        left: Callable[[AdapterSlot, float | None], None],
    ) -> None:
        self.arrival = arrival
        self._adapter = adapter
        self._at = at
        self._left = left
        self._released = False

    def release(self) -> None:
        """The request is over, or waits no longer; a second time does nothing."""
        if self._released:
            return
        self._released = True
        arrival = self.arrival
        if arrival is None:
            self._left(self._adapter, self._at)
            return
        arrival.cancel()
        if arrival.cancelled() or arrival.exception() is not None:
            self._adapter.waiting.pop(arrival, None)
            self._left(self._adapter, None)
        else:
            self._left(self._adapter, arrival.result())
