"""Host of a shared GPU group: several engines on the same GPUs, of which one shape at most is awake.

The host owns the GPUs of the largest shape. At boot it starts the engines of every shape, those that are not
wanted first: each answers the canary, goes to sleep, and is woken once to measure the wake time. From then on
the controller decides how many engines of each shape are awake; an engine wakes when no other uses its GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence

import msgspec

from policy.config.shared_gpus import GpuGroup as Plan
from policy.config.shared_gpus import cards, gpu_group_of
from policy.errors import EngineFailed
from policy.types import Replica, ReplicaPhase, StartPath
from policy.wire.heartbeat import Orders
from serve.engine.interface import EngineSpec
from serve.engine.main import Event
from serve.host.replica_host import HostSpec, ReplicaHost

# How long the host waits for the controller's first orders before it starts engines in any order.
FIRST_WORD_S = 5.0
# When all wanted engines have failed, the controller has this long to return to the shape that served
# before. After that the host is replaced.
LOST_S = 30.0


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
        group: SharedGpuHost,
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


class SharedGpuHost:
    """Runs the engines, each with its own replica id, heartbeat, port and process."""

    def __init__(self, spec: HostSpec, plan: Plan, *, replica: str, address: str, node: str) -> None:
        self.spec = spec
        self.lost = asyncio.Event()
        self._drain_s = spec.model.control.mode.drain_timeout_s
        unique = replica.rpartition("-")[2]
        self._sleepers = tuple(
            SleepingHost(
                spec,
                shape,
                cards(spec.model.shapes[shape], index),
                replica=f"{spec.model.name.replace('/', '.')}-{shape}-g{spec.generation}-{unique}"
                + (f"-{index}" if count > 1 else ""),
                address=address,
                node=node,
                group=self,
            )
            for shape, count in plan.engines.items()
            for index in range(count)
        )
        self._awake: dict[str, int] = {}
        self._ordered = asyncio.Event()
        self._may_boot = self._leaving = False
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()
        self._minding: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> tuple[ReplicaHost, ...]:
        """The replicas that send heartbeats."""
        return self._sleepers

    @property
    def booting(self) -> bool:
        """Whether some engines have not been started yet."""
        return any(not sleeper.tried for sleeper in self._sleepers)

    def order(self, awake: Mapping[str, int]) -> None:
        """Set how many engines of each shape are awake: those that are come first, failed ones last."""
        self._ordered.set()
        self._awake = dict(awake)
        chosen: set[SleepingHost] = set()
        for shape, count in awake.items():
            mine = [sleeper for sleeper in self._sleepers if sleeper.spec.shape == shape]
            mine.sort(key=lambda sleeper: (sleeper.failed, not sleeper.wanted))
            chosen |= set(mine[:count])
        if any(sleeper.wanted != (sleeper in chosen) for sleeper in self._sleepers):
            for sleeper in self._sleepers:
                sleeper.want(sleeper in chosen)
            self.notify()

    def neighbours(self, sleeper: SleepingHost) -> list[SleepingHost]:
        """The engines that share a GPU with this one."""
        return [
            other
            for other in self._sleepers
            if other is not sleeper and set(other.cards) & set(sleeper.cards)
        ]

    def may_start(self, sleeper: SleepingHost) -> bool:
        """Whether the engine may be started now; a start occupies its GPUs."""
        neighbours = self.neighbours(sleeper)
        if self._leaving or not self._may_boot or any(other.using for other in neighbours):
            return False
        if sleeper.wanted:
            # Last, so that it can stay awake.
            return all(other.tried or other.wanted for other in neighbours)
        return not sleeper.tried

    def notify(self) -> None:
        """Something changed: let every engine take its next step."""
        for sleeper in self._sleepers:
            sleeper.steer()
        wanted = [sleeper for sleeper in self._sleepers if sleeper.wanted]
        serves = any(sleeper.serving for sleeper in wanted)
        if self._may_boot and (serves or (not wanted and not self.booting)):
            self._settled.set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Return at the next change."""
        await self._changed.wait()

    async def start(self) -> None:
        """Return when a wanted engine serves, or all are asleep if none is wanted.

        Raises :class:`EngineFailed` when no wanted engine could be started.
        """
        self._minding = asyncio.create_task(self._supervise())
        for sleeper in self._sleepers:
            sleeper.begin()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_WORD_S):
                await self._ordered.wait()
        self._may_boot = True
        self.notify()
        waits = {asyncio.create_task(self._settled.wait()), asyncio.create_task(self.lost.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if self.lost.is_set():
            raise EngineFailed(next((s.reason for s in self._sleepers if s.reason), "the group was lost"))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests at once, and return when none is in flight or after ``timeout_s``."""
        self._leaving = True
        await asyncio.gather(*(sleeper.drain(timeout_s) for sleeper in self._sleepers))

    async def stop(self) -> None:
        """End every engine and everything that they started."""
        self._leaving = True
        if self._minding is not None:
            self._minding.cancel()
        await asyncio.gather(*(sleeper.stop() for sleeper in self._sleepers))

    async def _supervise(self) -> None:
        """Retry failed engines while others serve; give the host up when no wanted engine serves."""
        useless = False
        while True:
            await asyncio.sleep(LOST_S)
            self.order(self._awake)
            self.notify()
            wanted = [sleeper for sleeper in self._sleepers if sleeper.wanted]
            failed = [sleeper for sleeper in wanted if sleeper.failed]
            if useless and failed and len(failed) == len(wanted):
                self.lost.set()
            useless = bool(failed) and len(failed) == len(wanted)
            if not useless:
                for sleeper in failed:
                    sleeper.retry()


Host = ReplicaHost | SharedGpuHost


def host_of(spec: HostSpec, *, replica: str, address: str, node: str) -> Host:
    """The host for ``spec``: of one engine, or of the model's shared GPU group."""
    plan = gpu_group_of(spec.model)
    if plan is None:
        return ReplicaHost(spec, replica=replica, address=address, node=node)
    return SharedGpuHost(spec, plan, replica=replica, address=address, node=node)
