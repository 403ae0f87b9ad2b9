"""Sleep mode of an engine: drain and free the GPUs; after waking answer the canary before any traffic."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from policy.errors import EngineFailed
from policy.types import ReplicaPhase
from serve.engine.adapters.loader import AdapterLoader
from serve.engine.interface import Engine
from serve.engine.request_guard import RequestGuard

log = logging.getLogger("tidegate.engine")


@dataclass(slots=True, eq=False)
class SleepControl:
    """Puts one ready engine to sleep and wakes it, by the last command.

    ``warm`` sends it a canary. Sleeping and waking may take the engine ``timeout_s`` each; after that it
    fails, because a stuck engine holds GPUs that others wait for. The time may change. ``left``: the engine
    drains for good.
    """

    engine: Engine
    guard: RequestGuard
    adapters: AdapterLoader
    warm: Callable[[], Awaitable[None]]
    timeout_s: float
    left: bool = False
    _drain_s: float | None = None
    _asleep: bool = False
    _commanded: asyncio.Event = field(default_factory=asyncio.Event)

    def sleep(self, drain_s: float) -> None:
        """Sleep when no request is in flight. After ``drain_s`` seconds the remaining ones are cancelled."""
        self._drain_s = drain_s
        self._commanded.set()

    def wake(self) -> None:
        """Wake up; an engine that is still draining serves again at once."""
        self._drain_s = None
        self._commanded.set()

    def leave(self) -> None:
        """The engine drains for good; it does not go to sleep."""
        self.left = True

    async def run(self) -> None:
        """Carry out commands until cancelled; raises :class:`policy.errors.EngineFailed`."""
        while True:
            await self._commanded.wait()
            self._commanded.clear()
            if self.left:
                continue
            if self._drain_s is not None and not self._asleep:
                await self._fall_asleep(self._drain_s)
            elif self._drain_s is None and self._asleep:
                await self._wake_up()

    async def _fall_asleep(self, drain_s: float) -> None:
        self.guard.become(ReplicaPhase.DRAINING)
        commanded = asyncio.create_task(self._commanded.wait())
        emptied = asyncio.create_task(self.guard.emptied())
        try:
            await asyncio.wait({commanded, emptied}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            if self.left:
                return
            if commanded.done():
                if self._drain_s is None:
                    self.guard.reopen()
                return
            if not emptied.done():
                log.warning("requests were still in flight after %g s: they are cut", drain_s)
                self.guard.cut()
                await self._in_time(self.guard.emptied(), "end its requests")
        finally:
            commanded.cancel()
            emptied.cancel()
        # No adapter may be loaded until it wakes: there is no GPU memory for it.
        await self.adapters.engine.acquire()
        await self._in_time(self.engine.sleep(), "fall asleep")
        self._asleep = True
        if not self.left:
            self.guard.become(ReplicaPhase.ASLEEP)

    async def _wake_up(self) -> None:
        self.guard.become(ReplicaPhase.STARTING)
        await self._in_time(self.engine.wake(), "wake")
        self.adapters.engine.release()
        self._asleep = False
        await self._in_time(self.warm(), "answer after it woke")
        if not self.left:
            self.guard.become(ReplicaPhase.READY)

    async def _in_time(self, doing: Awaitable[None], what: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s):
                await doing
                return
        raise EngineFailed(f"the engine did not {what} within {self.timeout_s:g} s")
