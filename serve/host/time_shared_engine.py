"""An engine of a shared GPU group: it uses its GPUs in turn with the engines of other shapes.

Its host locks the GPUs while the engine has memory on them, and follows the controller's orders: it starts
the engine, puts it to sleep and wakes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from policy.types import Replica, ReplicaPhase, StartPath
from policy.wire.heartbeat import GpuCommand
from serve.async_waiting import wait_at_most
from serve.host.replica_host import GpuAccess, HostSpec, ReplicaHost
from serve.host.shared_gpu_locks import GpuLocks

# How often a lock that another engine has is tried again.
RETRY_S = 0.02
_SERVING = (GpuCommand.SERVE, GpuCommand.MEASURE, GpuCommand.WAIT)
_STARTING = (GpuCommand.SERVE, GpuCommand.MEASURE, GpuCommand.PREPARE)


class EngineSlot(msgspec.Struct, frozen=True, kw_only=True):
    """The place of an engine in its group: its ``cards`` by position, and their names for CUDA."""

    cards: tuple[int, ...]
    visible: tuple[str, ...]


class TimeSharedGpuAccess(GpuAccess):
    """The GPU access of one host, which it makes."""

    def __init__(
        self, spec: HostSpec, slot: EngineSlot, locks: GpuLocks, *, replica: str, address: str, node: str
    ) -> None:
        self.visible = ",".join(slot.visible)
        self.descriptors = locks.descriptors
        self.host = ReplicaHost(spec, replica=replica, address=address, node=node, gpus=self)
        self.host.update(cards=slot.cards)
        self._locks = locks
        self._order = GpuCommand.SLEEP
        # The phase that the engine reported, and whether it was ordered to sleep since it last served.
        self._engine_phase: ReplicaPhase | None = None
        self._sleeps = self._served = False
        self._following: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    def phase(self, replica: Replica) -> ReplicaPhase:
        """An engine that is not to serve is asleep, even before its first start."""
        ready = replica.state is ReplicaPhase.READY
        if replica.state in (ReplicaPhase.DRAINING, ReplicaPhase.STOPPED):
            return replica.state
        if self._order not in _SERVING:
            return ReplicaPhase.DRAINING if ready and self._served else ReplicaPhase.ASLEEP
        serves = ready and self._engine_phase is ReplicaPhase.READY and not self._sleeps
        return ReplicaPhase.READY if serves and self._serves else ReplicaPhase.STARTING

    @property
    def _serves(self) -> bool:
        """Whether it is to serve now."""
        measured = self._order is GpuCommand.MEASURE and self.host.replica.wake_s is not None
        return measured or self._order is GpuCommand.SERVE

    def ordered(self, order: GpuCommand) -> None:
        if order is self._order:
            return
        self._order = order
        if order is GpuCommand.SLEEP and self.host.replica.state is ReplicaPhase.STARTING:
            # It would only be started to sleep, while others wait for its GPUs.
            self.host.kill()
        self._notify()

    async def acquire(self) -> None:
        while not (self._order in _STARTING and self._locks.try_lock()):
            await self._wait(RETRY_S if self._order in _STARTING else None)
        self.host.update(start_path=StartPath.CACHED)
        # A start that takes too long occupies GPUs that others wait for.
        self._late = asyncio.get_running_loop().call_later(
            self.host.spec.model.control.start_timeout_s, self._kill_late
        )

    def changed(self) -> None:
        if self.host.replica.state is ReplicaPhase.READY and self._following is None:
            self._following = asyncio.create_task(self._follow())

    def reported(self, phase: ReplicaPhase) -> None:
        if phase is not self._engine_phase:
            self._engine_phase = phase
            self._notify()

    def released(self) -> None:
        for each in (self._late, self._following):
            if each is not None:
                each.cancel()
        self._late = self._following = self._engine_phase = None
        self._sleeps = self._served = False
        self._locks.unlock()

    async def _follow(self) -> None:
        """Follow the orders from the engine's start until its end."""
        while True:
            if self._serves:
                self._served = True
                self._notify()
                await self._until(lambda: not self._serves)
            if await self._fall_asleep():
                self._locks.unlock()
                await self._until(self._is_to_wake)
                await self._wake()

    def _is_to_wake(self) -> bool:
        measures = self._order in _STARTING and self.host.replica.wake_s is None
        return (measures or self._serves) and self._locks.try_lock()

    async def _fall_asleep(self) -> bool:
        """Drain and sleep; returns false if it was ordered to serve meanwhile, and does."""
        self._sleeps = True
        self.host.command(
            f"sleep {self.host.spec.model.control.mode.drain_timeout_s if self._served else 0.0}".encode()
        )
        self._notify()
        await self._until(lambda: self._engine_phase is ReplicaPhase.ASLEEP or self._serves)
        if self._engine_phase is ReplicaPhase.ASLEEP:
            self._served = False
            self._notify()
            return True
        # If it is falling asleep already, it wakes at once: the GPUs are still its own.
        self.host.command(b"wake")
        await self._until(lambda: self._engine_phase is ReplicaPhase.READY)
        self._sleeps = False
        return False

    async def _wake(self) -> None:
        first, began = self.host.replica.wake_s is None, time.monotonic()
        self.host.command(b"wake")
        await self._until(lambda: self._engine_phase is ReplicaPhase.READY)
        elapsed_s = time.monotonic() - began
        if not first:
            self.host.update(start_s=elapsed_s, start_path=StartPath.SLEEPING)
        self.host.update(wake_s=elapsed_s)
        self._sleeps = False
        self._notify()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; a lock in it is tried every 20 ms."""
        while not condition():
            await self._wait(RETRY_S)

    async def _wait(self, timeout_s: float | None) -> None:
        self._news.clear()
        if timeout_s is None:
            await self._news.wait()
        else:
            await wait_at_most(self._news, timeout_s)

    def _notify(self) -> None:
        self._news.set()
        self.host.changed.set()

    def _kill_late(self) -> None:
        if self.host.replica.state is ReplicaPhase.STARTING:
            self.host.kill()
