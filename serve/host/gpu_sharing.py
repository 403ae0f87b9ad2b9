"""A bed: one host of several engines on the same GPUs, of which those of one shape at most are awake.

It holds the GPUs of the largest shape. The engines of every shape are made at boot, the ones that nobody
wants first: each answers, falls asleep, is woken once to know how long that takes, and sleeps. From then on
the controller says how many of each shape shall be awake, and an engine wakes when no other uses its GPUs.
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

# How long a bed waits for the controller's first word before it makes engines in any order.
FIRST_WORD_S = 5.0
# When all engines that are wanted failed, the controller goes back to what served before, which takes it a
# moment; where it has nothing to go back to, a fresh host may do better.
LOST_S = 30.0


class SharedGpuHost:
    """Runs the engines, each with a replica id, a heartbeat, a port and a process of its own."""

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
                bed=self,
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
        """What of it beats."""
        return self._sleepers

    @property
    def booting(self) -> bool:
        """Whether there are engines that were not tried yet."""
        return any(not sleeper.tried for sleeper in self._sleepers)

    def order(self, awake: Mapping[str, int]) -> None:
        """Have so many engines of each shape awake: those that are, then the first that did not fail."""
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
            self.stir()

    def beside(self, sleeper: SleepingHost) -> list[SleepingHost]:
        """The engines that share a GPU with this one."""
        return [
            other
            for other in self._sleepers
            if other is not sleeper and set(other.cards) & set(sleeper.cards)
        ]

    def may_start(self, sleeper: SleepingHost) -> bool:
        """Whether the engine may be made now, which takes its GPUs."""
        beside = self.beside(sleeper)
        if self._leaving or not self._may_boot or any(other.using for other in beside):
            return False
        if sleeper.wanted:
            # Last, so that it can stay awake.
            return all(other.tried or other.wanted for other in beside)
        return not sleeper.tried

    def stir(self) -> None:
        """Something changed: let every engine do what it may do now."""
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
        """Return when an engine that is wanted serves, or all are asleep as they should be.

        Raises :class:`EngineFailed` when it is of no use.
        """
        self._minding = asyncio.create_task(self._mind())
        for sleeper in self._sleepers:
            sleeper.begin()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_WORD_S):
                await self._ordered.wait()
        self._may_boot = True
        self.stir()
        waits = {asyncio.create_task(self._settled.wait()), asyncio.create_task(self.lost.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if self.lost.is_set():
            raise EngineFailed(next((s.reason for s in self._sleepers if s.reason), "the bed was lost"))

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

    async def _mind(self) -> None:
        """Try again what failed while others serve; a bed of which nothing serves that is wanted is lost."""
        useless = False
        while True:
            await asyncio.sleep(LOST_S)
            self.order(self._awake)
            self.stir()
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
    """What runs ``spec``: a host of one engine, or the bed of its model."""
    plan = gpu_group_of(spec.model)
    if plan is None:
        return ReplicaHost(spec, replica=replica, address=address, node=node)
    return SharedGpuHost(spec, plan, replica=replica, address=address, node=node)


def _name(spec: HostSpec, shape: str, unique: str, index: int | None) -> str:
    name = f"{spec.model.name.replace('/', '.')}-{shape}-g{spec.generation}-{unique}"
    return name if index is None else f"{name}-{index}"
