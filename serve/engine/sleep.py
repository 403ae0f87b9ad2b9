"""An engine's sleep: drain, free the GPUs, and on the way back a real answer before any traffic."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from policy.errors import EngineFailed
from policy.types import ReplicaPhase
from serve.engine.adapters.loader import AdapterLoader
from serve.engine.guard import Guard
from serve.engine.port import Engine

log = logging.getLogger("tidegate.engine")


class SleepControl:
    """Moves one engine that is ready between waking and sleeping, as it was told last.

    ``warm`` asks it for a real answer. Neither way may take the engine itself longer than ``timeout_s``: one
    that is stuck holds GPUs that others wait for, so it fails.
    """

    def __init__(
        self,
        engine: Engine,
        guard: Guard,
        adapters: AdapterLoader,
        warm: Callable[[], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._guard = guard
        self._adapters = adapters
        self._warm = warm
        self._timeout_s = timeout_s
        self._drain_s: float | None = None
        self._asleep = False
        self._left = False
        self._told = asyncio.Event()

    def sleep(self, drain_s: float) -> None:
        """Sleep once the requests in flight are done, at most ``drain_s`` from now; the rest are cut."""
        self._drain_s = drain_s
        self._told.set()

    def wake(self) -> None:
        """Be awake; one that only drains for its sleep serves on at once."""
        self._drain_s = None
        self._told.set()

    def leave(self) -> None:
        """The engine drains for good, and need not fall asleep for it."""
        self._left = True

    async def run(self) -> None:
        """Do as told until cancelled; raises :class:`policy.errors.EngineFailed`."""
        while True:
            await self._told.wait()
            self._told.clear()
            if self._left:
                continue
            if self._drain_s is not None and not self._asleep:
                await self._fall_asleep(self._drain_s)
            elif self._drain_s is None and self._asleep:
                await self._wake_up()

    async def _fall_asleep(self, drain_s: float) -> None:
        self._guard.become(ReplicaPhase.DRAINING)
        told = asyncio.create_task(self._told.wait())
        emptied = asyncio.create_task(self._guard.emptied())
        try:
            await asyncio.wait({told, emptied}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            if self._left:
                return
            if told.done():
                if self._drain_s is None:
                    self._guard.reopen()
                return
            if not emptied.done():
                log.warning("requests were still in flight after %g s: they are cut", drain_s)
                self._guard.cut()
                await self._in_time(self._guard.emptied(), "end its requests")
        finally:
            told.cancel()
            emptied.cancel()
        # Until it wakes nothing is loaded: there is no memory to load it to.
        await self._adapters.engine.acquire()
        await self._in_time(self._engine.sleep(), "fall asleep")
        self._asleep = True
        if not self._left:
            self._guard.become(ReplicaPhase.ASLEEP)

    async def _wake_up(self) -> None:
        self._guard.become(ReplicaPhase.STARTING)
        await self._in_time(self._engine.wake(), "wake")
        self._adapters.engine.release()
        self._asleep = False
        await self._in_time(self._warm(), "answer after it woke")
        if not self._left:
            self._guard.become(ReplicaPhase.READY)

    async def _in_time(self, doing: Awaitable[None], what: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await doing
                return
        raise EngineFailed(f"the engine did not {what} within {self._timeout_s:g} s")
