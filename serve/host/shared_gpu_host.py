"""Host of a shared GPU group: several engines on the same GPUs, of which one shape at most is awake.

The host owns the GPUs of the largest shape. At boot it starts the engines of every shape, those that are not
wanted first: each answers the canary, goes to sleep, and is woken once to measure the wake time. From then on
the controller decides how many engines of each shape are awake; an engine wakes when no other uses its GPUs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence

import msgspec

from policy.config.shapes_on_shared_gpus import GpuGroup as Plan
from policy.config.shapes_on_shared_gpus import cards, gpu_group_of
from policy.errors import EngineFailed
from policy.types import Replica, ReplicaPhase, StartPath
from serve.async_waiting import wait_at_most
from serve.host.replica_host import GpuAccess, HostSpec, ReplicaHost

# How long the host waits for the controller's first orders before it starts engines in any order.
FIRST_ORDERS_S = 5.0
# When all wanted engines have failed, the controller has this long to return to the shape that served
# before. After that the host is replaced.
LOST_S = 30.0


class SleepingEngine(GpuAccess):
    """One engine of a GPU group. ``using`` is whether it has memory on its GPUs, or is about to.

    ``tried`` is whether a start has succeeded or failed. ``failed`` is whether it failed too often in a row;
    it is not started again until it is wanted anew.
    """

    def __init__(  # noqa: PLR0917
        self, group: SharedGpuHost, spec: HostSpec, gpus: Sequence[int], replica: str, address: str, node: str
    ) -> None:
        self.cards = gpus
        self.wanted = self.using = self.tried = self.failed = False
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(card) for card in range(max(gpus) + 1)] if visible is None else visible.split(",")
        self.visible = ",".join(names[card] for card in gpus if card < len(names))
        self.host = ReplicaHost(spec, replica=replica, address=address, node=node, gpus=self)
        self.host.lost = group.lost
        self._control = spec.model.control
        self._group = group
        # The state that the engine reported, and the last command sent to it.
        self._engine_phase: ReplicaPhase | None = None
        self._ordered_asleep = self._served = False
        self._woken_at: float | None = None
        self._late: asyncio.TimerHandle | None = None
        self._again = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether it is wanted and takes requests."""
        return self.phase(self.host.replica) is ReplicaPhase.READY

    def want(self, wanted: bool) -> None:
        """Set whether it should be awake; takes effect when the group calls :meth:`steer`."""
        if wanted != self.wanted:
            self.wanted = wanted
            if wanted:
                self.retry()
            self.host.changed.set()

    def retry(self) -> None:
        """Start a failed engine again, as the first start of a row."""
        self.host.update(failures=0)
        self._again.set()

    def steer(self) -> None:
        """Send the engine to sleep or wake it, if it is started and allowed to."""
        state = self.host.replica.state
        if state is ReplicaPhase.STARTING and self.using and not self.wanted and not self._group.booting:
            # It would only be started to sleep, while others wait for its GPUs.
            self.host.kill()
        if state is not ReplicaPhase.READY:
            return
        # The wake time is measured before the first request.
        known = self.host.replica.wake_s is not None
        blocked = self._engine_phase is ReplicaPhase.ASLEEP and self._group.in_use(self)
        if self._ordered_asleep and self.wanted and known and not blocked:
            self._wake()
        elif not self._ordered_asleep and self._woken_at is None and not (self.wanted and known):
            self._ordered_asleep = True
            self.host.command(f"sleep {self._control.mode.drain_timeout_s if self._served else 0.0}".encode())
        if self.serving:
            self._served = self.tried = True

    def _wake(self) -> None:
        self.using = True
        self._ordered_asleep = False
        if self._engine_phase is ReplicaPhase.ASLEEP:
            self._woken_at = time.monotonic()
        self.host.command(b"wake")

    def phase(self, replica: Replica) -> ReplicaPhase:
        """An engine that is not wanted is asleep, even before its first start."""
        ready = replica.state is ReplicaPhase.READY
        if replica.state in (ReplicaPhase.DRAINING, ReplicaPhase.STOPPED):
            return replica.state
        if not self.wanted:
            return ReplicaPhase.DRAINING if ready and self._served else ReplicaPhase.ASLEEP
        serves = ready and self._engine_phase is ReplicaPhase.READY and not self._ordered_asleep
        return ReplicaPhase.READY if serves else ReplicaPhase.STARTING

    def ordered(self, awake: Mapping[str, int]) -> None:
        self._group.order(awake)

    def changed(self) -> None:
        self._group.notify()

    def reported(self, phase: ReplicaPhase) -> None:
        if phase is self._engine_phase:
            return
        self._engine_phase = phase
        if phase is ReplicaPhase.READY and self._woken_at is not None:
            elapsed_s = time.monotonic() - self._woken_at
            if self.host.replica.wake_s is not None:
                self.host.update(start_s=elapsed_s, start_path=StartPath.SLEEPING)
            self.host.update(wake_s=elapsed_s)
            self._woken_at = None
        elif phase is ReplicaPhase.ASLEEP:
            self._served = False
            if not self._ordered_asleep:
                # It was ordered to wake while it went to sleep, and wakes now.
                self._woken_at = time.monotonic()
            elif self.host.replica.wake_s is None:
                self._wake()
            else:
                self.using, self.tried = False, True
        self.host.changed.set()
        self._group.notify()

    async def acquire(self) -> None:
        while not self._group.may_start(self):
            await self._group.changed.wait()
        self.using = True
        self.tried = self.tried or self.wanted
        self.host.update(start_path=StartPath.CACHED)
        self._late = asyncio.get_running_loop().call_later(self._control.start_timeout_s, self._kill_late)

    def released(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self.using = self._ordered_asleep = self._served = False
        self.tried = True
        self._engine_phase = self._woken_at = None

    async def may_retry(self) -> bool:
        self.failed = True
        self._again.clear()
        self._group.notify()
        await self._again.wait()
        self.failed = False
        return True

    def _kill_late(self) -> None:
        """Kill a start that takes too long, because it occupies GPUs that others wait for."""
        if self.host.replica.state is ReplicaPhase.STARTING:
            self.host.kill()


class SharedGpuHost:
    """Runs the engines, each with its own replica id, heartbeat, port and process.

    ``changed`` is set, and replaced, at each change of an engine.
    """

    def __init__(self, spec: HostSpec, plan: Plan, *, replica: str, address: str, node: str) -> None:
        self.spec = spec
        self.lost = asyncio.Event()
        unique = replica.rpartition("-")[2]
        self._engines = tuple(
            SleepingEngine(
                self,
                msgspec.structs.replace(spec, shape=shape),
                cards(spec.model.shapes[shape], index),
                replica=f"{spec.model.name.replace('/', '.')}-{shape}-g{spec.generation}-{unique}"
                + (f"-{index}" if count > 1 else ""),
                address=address,
                node=node,
            )
            for shape, count in plan.engines.items()
            for index in range(count)
        )
        self._awake: dict[str, int] = {}
        self._ordered = asyncio.Event()
        self._may_boot = self._leaving = False
        self._settled = asyncio.Event()
        self.changed = asyncio.Event()
        self._supervising: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> tuple[ReplicaHost, ...]:
        """The hosts that send heartbeats."""
        return tuple(engine.host for engine in self._engines)

    @property
    def booting(self) -> bool:
        """Whether some engines have not been started yet."""
        return any(not engine.tried for engine in self._engines)

    def order(self, awake: Mapping[str, int]) -> None:
        """Set how many engines of each shape are awake: those that are come first, failed ones last."""
        self._ordered.set()
        self._awake = dict(awake)
        chosen: set[SleepingEngine] = set()
        for shape, count in awake.items():
            mine = [engine for engine in self._engines if engine.host.spec.shape == shape]
            mine.sort(key=lambda engine: (engine.failed, not engine.wanted))
            chosen |= set(mine[:count])
        if any(engine.wanted != (engine in chosen) for engine in self._engines):
            for engine in self._engines:
                engine.want(engine in chosen)
            self.notify()

    def _neighbours(self, engine: SleepingEngine) -> list[SleepingEngine]:
        """The engines that share a GPU with this one."""
        mine = set(engine.cards)
        return [other for other in self._engines if other is not engine and not mine.isdisjoint(other.cards)]

    def in_use(self, engine: SleepingEngine) -> bool:
        """Whether another engine uses GPUs of this one."""
        return any(other.using for other in self._neighbours(engine))

    def may_start(self, engine: SleepingEngine) -> bool:
        """Whether the engine may be started now; a start occupies its GPUs."""
        if self._leaving or not self._may_boot or self.in_use(engine):
            return False
        if engine.wanted:
            # Last, so that it can stay awake.
            return all(other.tried or other.wanted for other in self._neighbours(engine))
        return not engine.tried

    def notify(self) -> None:
        """Something changed: let every engine take its next step."""
        for engine in self._engines:
            engine.steer()
        wanted = [engine for engine in self._engines if engine.wanted]
        serves = any(engine.serving for engine in wanted)
        if self._may_boot and (serves or (not wanted and not self.booting)):
            self._settled.set()
        self.changed.set()
        self.changed = asyncio.Event()

    async def start(self) -> None:
        """Return when a wanted engine serves, or all are asleep if none is wanted.

        Raises :class:`EngineFailed` when no wanted engine could be started.
        """
        self._supervising = asyncio.create_task(self._supervise())
        for engine in self._engines:
            engine.host.begin()
        await wait_at_most(self._ordered, FIRST_ORDERS_S)
        self._may_boot = True
        self.notify()
        waits = {asyncio.create_task(self._settled.wait()), asyncio.create_task(self.lost.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if self.lost.is_set():
            reasons = (engine.host.replica.reason for engine in self._engines)
            raise EngineFailed(next(filter(None, reasons), "the group was lost"))

    async def drain(self) -> None:
        """Refuse new requests at once, and return when none is in flight or after the drain timeout."""
        self._leaving = True
        await asyncio.gather(*(host.drain() for host in self.replicas))

    async def stop(self) -> None:
        """End every engine and everything that they started."""
        self._leaving = True
        if self._supervising is not None:
            self._supervising.cancel()
        await asyncio.gather(*(host.stop() for host in self.replicas))

    async def _supervise(self) -> None:
        """Retry failed engines while others serve; give the host up when no wanted engine serves."""
        useless = False
        while True:
            await asyncio.sleep(LOST_S)
            self.order(self._awake)
            self.notify()
            wanted = [engine for engine in self._engines if engine.wanted]
            all_failed = bool(wanted) and all(engine.failed for engine in wanted)
            if useless and all_failed:
                self.lost.set()
            useless = all_failed
            for engine in wanted:
                if engine.failed and not useless:
                    engine.retry()


Host = ReplicaHost | SharedGpuHost


def host_of(spec: HostSpec, *, replica: str, address: str, node: str) -> Host:
    """The host for ``spec``: of one engine, or of the model's shared GPU group."""
    plan = gpu_group_of(spec.model)
    if plan is None:
        return ReplicaHost(spec, replica=replica, address=address, node=node)
    return SharedGpuHost(spec, plan, replica=replica, address=address, node=node)
