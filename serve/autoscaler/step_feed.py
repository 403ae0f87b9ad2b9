"""Who listens to what the engines of a model tell of their steps, while they calibrate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from policy.types import ReplicaPhase
from policy.wire.heartbeat import Heartbeat
from policy.wire.reports import EngineReport

# Of reports that a listener is too slow for, the oldest are dropped: this is minutes of a large fleet.
MOST = 4096
# A listener hears something at least so often, so that it knows who answers, and who has gone is noticed.
SILENT_S = 1.0


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine of one ready replica told at once; without a ``replica`` nobody told anything."""

    replica: str = ""
    shape: str = ""
    generation: int = 0
    engine: EngineReport | None = None


class StepSubscribers:
    """Reports of engines go to whoever listens at that moment, and nowhere else."""

    def __init__(self) -> None:
        self._queues: list[tuple[str, asyncio.Queue[StepLine]]] = []

    def tell(self, beat: Heartbeat) -> None:
        """Pass a heartbeat on."""
        replica = beat.replica
        if self.deaf or beat.engine is None or replica.state is not ReplicaPhase.READY:
            return
        told = StepLine(
            replica=replica.id, shape=replica.shape, generation=replica.generation, engine=beat.engine
        )
        for model, queue in self._queues:
            if model == replica.model:
                if queue.full():
                    queue.get_nowait()
                queue.put_nowait(told)

    @property
    def deaf(self) -> bool:
        """Whether nobody listens."""
        return not self._queues

    async def listen(self, model: str, silent_s: float = SILENT_S) -> AsyncGenerator[StepLine, None]:
        """All that the replicas of ``model`` tell from now on, and now and then that there was nothing."""
        queue: asyncio.Queue[StepLine] = asyncio.Queue(MOST)
        entry = (model, queue)
        self._queues.append(entry)
        try:
            yield StepLine()
            while True:
                try:
                    async with asyncio.timeout(silent_s):
                        told = await queue.get()
                except TimeoutError:
                    told = StepLine()
                yield told
        finally:
            self._queues.remove(entry)
