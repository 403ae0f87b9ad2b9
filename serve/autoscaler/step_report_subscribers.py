"""Streams the step reports of a model's engines to subscribers, for calibration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from policy.types import ReplicaPhase
from policy.wire.controller_reports import EngineReport
from policy.wire.heartbeat import Heartbeat

# A slow subscriber loses the oldest reports beyond this: minutes of a large fleet.
MOST = 4096
# Without reports an empty line is sent this often, so that both ends notice a broken connection.
SILENT_S = 1.0


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One report of the engine of a ready replica; without a ``replica`` an empty line."""

    replica: str = ""
    shape: str = ""
    generation: int = 0
    engine: EngineReport | None = None


class StepSubscribers:
    """Passes step reports on to the present subscribers; nothing is kept."""

    def __init__(self) -> None:
        self._queues: list[tuple[str, asyncio.Queue[StepLine]]] = []

    def publish(self, beat: Heartbeat) -> None:
        """Pass the step report of a heartbeat on."""
        replica = beat.replica
        if not self._queues or beat.engine is None or replica.state is not ReplicaPhase.READY:
            return
        line = StepLine(
            replica=replica.id, shape=replica.shape, generation=replica.generation, engine=beat.engine
        )
        for model, queue in self._queues:
            if model == replica.model:
                if queue.full():
                    queue.get_nowait()
                queue.put_nowait(line)

    async def listen(self, model: str, silent_s: float = SILENT_S) -> AsyncGenerator[StepLine, None]:
        """The step reports of the replicas of ``model`` from now on, and empty lines in between."""
        queue: asyncio.Queue[StepLine] = asyncio.Queue(MOST)
        entry = (model, queue)
        self._queues.append(entry)
        try:
            yield StepLine()
            while True:
                try:
                    async with asyncio.timeout(silent_s):
                        line = await queue.get()
                except TimeoutError:
                    line = StepLine()
                yield line
        finally:
            self._queues.remove(entry)
