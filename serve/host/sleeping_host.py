"""A replica host in a bed: its engine sleeps and wakes, and takes turns with those on its GPUs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from policy.types import Replica, ReplicaPhase, StartPath
from policy.wire.heartbeat import Orders
from serve.engine.main import Event
from serve.engine.port import EngineSpec
from serve.host.host import HostSpec, ReplicaHost


class GpuGroupPort(Protocol):
    """What an engine in a bed knows of it; see :class:`serve.host.gpu_sharing.SharedGpuHost`."""

    lost: asyncio.Event

    @property
    def booting(self) -> bool:
        """Whether engines are made for the first time."""
        ...

    def order(self, awake: dict[str, int]) -> None:
        """Have so many engines of each shape awake."""
        ...

    def beside(self, sleeper: SleepingHost) -> list[SleepingHost]:
        """Those that share its GPUs."""
        ...

    def may_start(self, sleeper: SleepingHost) -> bool:
        """Whether it may be made now."""
        ...

    def stir(self) -> None:
        """Something changed."""
        ...

    async def changed(self) -> None:
        """Return at the next change."""
        ...


class SleepingHost(ReplicaHost):
    """One engine of a bed. ``using`` is whether it has memory on its GPUs, or will at once.

    ``tried`` is whether it was made once, or failed to be; ``failed`` that it did so often in a row and is
    left alone until it is wanted anew.
    """

    def __init__(
        self,
        spec: HostSpec,
        shape: str,
        cards: Sequence[int],
        *,
        replica: str,
        address: str,
        node: str,
        bed: GpuGroupPort,
    ) -> None:
        super().__init__(
            msgspec.structs.replace(spec, shape=shape), replica=replica, address=address, node=node
        )
        self.cards = cards
        self.lost = bed.lost
        self.wanted = self.using = self.tried = self.failed = False
        self._bed = bed
        # What the engine says it does, and what it was told last.
        self._does: ReplicaPhase | None = None
        self._told_sleep = self._served = False
        self._woken_at: float | None = None
        self._wake_s: float | None = None
        self._again = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether it takes requests and shall."""
        return self._said() is ReplicaPhase.READY

    @property
    def reason(self) -> str:
        """Why it does not, if it failed."""
        return self._reason

    def snapshot(self) -> Replica:
        """The replica as it is now: what is not wanted is asleep, also where its engine is yet to be made."""
        return msgspec.structs.replace(super().snapshot(), state=self._said(), wake_s=self._wake_s)

    def obey(self, orders: Orders) -> None:
        """Take what the controller wants of this engine, and of the bed."""
        super().obey(orders)
        if orders.awake is not None:
            self._bed.order(orders.awake)

    def want(self, wanted: bool) -> None:
        """Be awake, or not; the bed stirs after it has told all."""
        if wanted != self.wanted:
            self.wanted = wanted
            if wanted:
                self._failures = 0
                self.retry()
            self.changed.set()

    def retry(self) -> None:
        """Try again to make what failed."""
        self._again.set()

    def steer(self) -> None:
        """Tell the engine to sleep or to wake, as far as it is made and may."""
        if self._state is ReplicaPhase.STARTING and self.using and not self.wanted and not self._bed.booting:
            # It would only be made to sleep, and others wait for its GPUs.
            self._kill()
        if self._state is not ReplicaPhase.READY:
            return
        # How long a wake takes is found out before the first request.
        known = self._wake_s is not None
        asleep = self._does is ReplicaPhase.ASLEEP
        if self._told_sleep and self.wanted and known and not (asleep and self._blocked):
            self._wake()
        elif not self._told_sleep and self._woken_at is None and not (self.wanted and known):
            drain_s = self.spec.model.control.mode.drain_timeout_s if self._served else 0.0
            self._told_sleep = True
            self._tell(f"sleep {drain_s}".encode())
        if self.serving:
            self._served = self.tried = True

    @property
    def _blocked(self) -> bool:
        return any(other.using for other in self._bed.beside(self))

    def _wake(self) -> None:
        self.using = True
        self._told_sleep = False
        if self._does is ReplicaPhase.ASLEEP:
            self._woken_at = time.monotonic()
        self._tell(b"wake")

    def _said(self) -> ReplicaPhase:
        if self._state in (ReplicaPhase.DRAINING, ReplicaPhase.STOPPED):
            return self._state
        if self._state is ReplicaPhase.READY and not self.wanted and self._served:
            return ReplicaPhase.DRAINING
        if not self.wanted:
            return ReplicaPhase.ASLEEP
        serves = self._state is ReplicaPhase.READY and self._does is ReplicaPhase.READY
        return ReplicaPhase.READY if serves and not self._told_sleep else ReplicaPhase.STARTING

    def _take(self, event: Event, began: float) -> str:
        failed = super()._take(event, began)
        if event.line is not None and event.line.state is not self._does:
            self._now_does(event.line.state)
        return failed

    def _now_does(self, state: ReplicaPhase) -> None:
        self._does = state
        if state is ReplicaPhase.READY and self._woken_at is not None:
            took_s = time.monotonic() - self._woken_at
            if self._wake_s is not None:
                self._start_s, self._start_path = took_s, StartPath.SLEEPING
            self._wake_s, self._woken_at = took_s, None
        elif state is ReplicaPhase.ASLEEP:
            self._served = False
            if not self._told_sleep:
                # It was told to wake while it fell asleep, and does so now.
                self._woken_at = time.monotonic()
            elif self._wake_s is None:
                self._wake()
            else:
                self.using, self.tried = False, True
        self.changed.set()
        self._bed.stir()

    async def _turn(self) -> None:
        while not self._bed.may_start(self):
            await self._bed.changed()
        self.using = True
        self._start_path = StartPath.CACHED

    async def _run_engine(self, began: float) -> None:
        if self.wanted:
            self.tried = True
        patience_s = self.spec.model.control.start_timeout_s
        late = asyncio.get_running_loop().call_later(patience_s, self._kill_late)
        try:
            await super()._run_engine(began)
        finally:
            late.cancel()
            self.using = self._told_sleep = self._served = False
            self.tried = True
            self._does = self._woken_at = None

    async def _keep_alive(self) -> None:
        try:
            await super()._keep_alive()
        finally:
            self.using = False

    async def _give_up(self) -> bool:
        self.failed = True
        self._again.clear()
        self._bed.stir()
        await self._again.wait()
        self.failed = False
        self._failures = 0
        return False

    def _become(self, state: ReplicaPhase, reason: str = "") -> None:
        super()._become(state, reason)
        if state is not ReplicaPhase.STOPPED:
            self._bed.stir()

    def _kill_late(self) -> None:
        """A start that takes too long keeps its GPUs from others."""
        if self._state is ReplicaPhase.STARTING:
            self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _engine_spec(self) -> EngineSpec:
        return msgspec.structs.replace(super()._engine_spec(), sleeps=True)

    def _environment(self) -> dict[str, str]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(card) for card in range(max(self.cards) + 1)] if visible is None else visible.split(",")
        mine = ",".join(names[card] for card in self.cards if card < len(names))
        return super()._environment() | {"CUDA_VISIBLE_DEVICES": mine}
