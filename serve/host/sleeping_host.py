"""A replica host in a shared GPU group: its engine sleeps and wakes, one at a time on each GPU."""

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
    """The GPU group as its engines see it; see :class:`serve.host.gpu_sharing.SharedGpuHost`."""

    lost: asyncio.Event

    @property
    def booting(self) -> bool:
        """Whether some engines have not been started yet."""
        ...

    def order(self, awake: dict[str, int]) -> None:
        """Set how many engines of each shape are awake."""
        ...

    def neighbours(self, sleeper: SleepingHost) -> list[SleepingHost]:
        """The engines that share its GPUs."""
        ...

    def may_start(self, sleeper: SleepingHost) -> bool:
        """Whether it may be started now."""
        ...

    def notify(self) -> None:
        """Something changed."""
        ...

    async def changed(self) -> None:
        """Return at the next change."""
        ...


class SleepingHost(ReplicaHost):
    """One engine of a GPU group. ``using`` is whether it has memory on its GPUs, or is about to.

    ``tried`` is whether a start has succeeded or failed. ``failed`` is whether it failed too often in a row;
    it is not started again until it is wanted anew.
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
        group: GpuGroupPort,
    ) -> None:
        super().__init__(
            msgspec.structs.replace(spec, shape=shape), replica=replica, address=address, node=node
        )
        self.cards = cards
        self.lost = group.lost
        self.wanted = self.using = self.tried = self.failed = False
        self._group = group
        # The state that the engine reported, and the last command sent to it.
        self._engine_phase: ReplicaPhase | None = None
        self._ordered_asleep = self._served = False
        self._woken_at: float | None = None
        self._wake_s: float | None = None
        self._again = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether it is wanted and takes requests."""
        return self._phase() is ReplicaPhase.READY

    @property
    def reason(self) -> str:
        """Why it does not serve, if it failed."""
        return self._reason

    def snapshot(self) -> Replica:
        """The current state of the replica; one that is not wanted is asleep, even before its first start."""
        return msgspec.structs.replace(super().snapshot(), state=self._phase(), wake_s=self._wake_s)

    def obey(self, orders: Orders) -> None:
        """Take the controller's orders for this engine and for the group."""
        super().obey(orders)
        if orders.awake is not None:
            self._group.order(orders.awake)

    def want(self, wanted: bool) -> None:
        """Set whether it should be awake; takes effect when the group calls :meth:`steer`."""
        if wanted != self.wanted:
            self.wanted = wanted
            if wanted:
                self._failures = 0
                self.retry()
            self.changed.set()

    def retry(self) -> None:
        """Start a failed engine again."""
        self._again.set()

    def steer(self) -> None:
        """Send the engine to sleep or wake it, if it is started and allowed to."""
        if (
            self._state is ReplicaPhase.STARTING
            and self.using
            and not self.wanted
            and not self._group.booting
        ):
            # It would only be started to sleep, while others wait for its GPUs.
            self._kill()
        if self._state is not ReplicaPhase.READY:
            return
        # The wake time is measured before the first request.
        known = self._wake_s is not None
        asleep = self._engine_phase is ReplicaPhase.ASLEEP
        if self._ordered_asleep and self.wanted and known and not (asleep and self._blocked):
            self._wake()
        elif not self._ordered_asleep and self._woken_at is None and not (self.wanted and known):
            drain_s = self.spec.model.control.mode.drain_timeout_s if self._served else 0.0
            self._ordered_asleep = True
            self._command(f"sleep {drain_s}".encode())
        if self.serving:
            self._served = self.tried = True

    @property
    def _blocked(self) -> bool:
        return any(other.using for other in self._group.neighbours(self))

    def _wake(self) -> None:
        self.using = True
        self._ordered_asleep = False
        if self._engine_phase is ReplicaPhase.ASLEEP:
            self._woken_at = time.monotonic()
        self._command(b"wake")

    def _phase(self) -> ReplicaPhase:
        if self._state in (ReplicaPhase.DRAINING, ReplicaPhase.STOPPED):
            return self._state
        if self._state is ReplicaPhase.READY and not self.wanted and self._served:
            return ReplicaPhase.DRAINING
        if not self.wanted:
            return ReplicaPhase.ASLEEP
        serves = self._state is ReplicaPhase.READY and self._engine_phase is ReplicaPhase.READY
        return ReplicaPhase.READY if serves and not self._ordered_asleep else ReplicaPhase.STARTING

    def _take(self, event: Event, began: float) -> str:
        failed = super()._take(event, began)
        if event.line is not None and event.line.state is not self._engine_phase:
            self._engine_changed(event.line.state)
        return failed

    def _engine_changed(self, state: ReplicaPhase) -> None:
        self._engine_phase = state
        if state is ReplicaPhase.READY and self._woken_at is not None:
            elapsed_s = time.monotonic() - self._woken_at
            if self._wake_s is not None:
                self._start_s, self._start_path = elapsed_s, StartPath.SLEEPING
            self._wake_s, self._woken_at = elapsed_s, None
        elif state is ReplicaPhase.ASLEEP:
            self._served = False
            if not self._ordered_asleep:
                # It was ordered to wake while it went to sleep, and wakes now.
                self._woken_at = time.monotonic()
            elif self._wake_s is None:
                self._wake()
            else:
                self.using, self.tried = False, True
        self.changed.set()
        self._group.notify()

    async def _await_gpus(self) -> None:
        while not self._group.may_start(self):
            await self._group.changed()
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
            self.using = self._ordered_asleep = self._served = False
            self.tried = True
            self._engine_phase = self._woken_at = None

    async def _keep_alive(self) -> None:
        try:
            await super()._keep_alive()
        finally:
            self.using = False

    async def _give_up(self) -> bool:
        self.failed = True
        self._again.clear()
        self._group.notify()
        await self._again.wait()
        self.failed = False
        self._failures = 0
        return False

    def _become(self, state: ReplicaPhase, reason: str = "") -> None:
        super()._become(state, reason)
        if state is not ReplicaPhase.STOPPED:
            self._group.notify()

    def _kill_late(self) -> None:
        """Kill a start that takes too long, because it occupies GPUs that others wait for."""
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
