"""Host of a shared GPU group: several engines on the same GPUs, of which one shape at most is awake.

The host owns the GPUs of the largest shape. At boot it starts the engines of every shape, those that are not
wanted first: each answers the canary, goes to sleep, and is woken once to measure the wake time. From then on
the controller decides how many engines of each shape are awake; an engine wakes when no other uses its GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from policy.config.gpu_sharing import GpuGroup as Plan
from policy.config.gpu_sharing import cards, gpu_group_of
from policy.errors import EngineFailed
from serve.host.host import HostSpec, ReplicaHost
from serve.host.sleeping_host import SleepingHost

# How long the host waits for the controller's first orders before it starts engines in any order.
FIRST_WORD_S = 5.0
# When all wanted engines have failed, the controller has this long to return to the shape that served
# before. After that the host is replaced.
LOST_S = 30.0


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
                replica=_name(spec, shape, unique, index if count > 1 else None),
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


def _name(spec: HostSpec, shape: str, unique: str, index: int | None) -> str:
    name = f"{spec.model.name.replace('/', '.')}-{shape}-g{spec.generation}-{unique}"
    return name if index is None else f"{name}-{index}"
