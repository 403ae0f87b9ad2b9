"""Open-loop replay: each request is sent at its time in the trace, whatever the endpoint does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter

from sim.arrivals import Arrival
from tidegate.replay.endpoint_api import RequestFormat, send
from tidegate.replay.http_client import ReplayConnectionPool
from tidegate.replay.prompts import PromptGenerator
from tidegate.replay.response_timing import StreamTimings
from tidegate.replay.results import ReplayRow

# Prompts are built this long before they are sent; the first request is sent this long after the start.
LEAD_S = 0.05


@dataclass
class TracePlayer:
    """Plays a trace against ``pool``; ``on_row`` receives each request that ended.

    At most ``in_flight`` requests are open: later ones are delayed. ``cut`` counts those cut by :meth:`stop`.
    """

    pool: ReplayConnectionPool
    request_format: RequestFormat
    prompts: PromptGenerator
    in_flight: int
    on_row: Callable[[ReplayRow], None]
    cut: int = 0
    _open: set[asyncio.Task[None]] = field(default_factory=set)
    _error: BaseException | None = None
    _sending: asyncio.Task[None] | None = None

    async def play(self, arrivals: Iterable[Arrival]) -> None:
        """Return when every answer has ended, or :meth:`stop` was called."""
        self._sending = asyncio.create_task(self._send(arrivals))
        await asyncio.wait([self._sending])
        if self._open:
            await asyncio.wait(self._open)
        if self._error is not None:  # the record cannot be written
            raise self._error
        if not self._sending.cancelled():
            self._sending.result()  # raises the error of an invalid trace

    def stop(self) -> None:
        """Send nothing more, and cancel the open requests."""
        if self._sending is not None:
            self._sending.cancel()
        for task in self._open:
            task.cancel()

    async def _send(self, arrivals: Iterable[Arrival]) -> None:
        start = perf_counter() + LEAD_S
        slots = asyncio.Semaphore(self.in_flight)
        for number, arrival in enumerate(arrivals):
            due = start + arrival.at
            await _until(due - LEAD_S)
            name = self.request_format.name(arrival)
            body = self.request_format.body(name, self.prompts.text(arrival, number), arrival.output_tokens)
            await _until(due)
            await slots.acquire()
            task = asyncio.create_task(self._send_one(arrival, name, body, start))
            self._open.add(task)
            task.add_done_callback(lambda _: slots.release())
            task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if task.cancelled():
            self.cut += 1
        elif (error := task.exception()) is not None:
            self._error = error
            self.stop()

    async def _send_one(self, arrival: Arrival, name: str, body: bytes, start: float) -> None:
        status, timings = await send(self.pool, self.request_format.path, body)
        self.on_row(_row(arrival, name, timings, status, start))


def _row(arrival: Arrival, name: str, timings: StreamTimings, status: int, start: float) -> ReplayRow:
    sent_at = timings.sent_at
    at = sent_at - start
    whole = not timings.error
    itl_s = timings.itl_s() if whole else None
    return ReplayRow(
        at=round(at, 6),
        late_s=round(at - arrival.at, 6),
        input_tokens=timings.input_tokens or arrival.input_tokens,
        output_tokens=timings.output_tokens or arrival.output_tokens,
        cached_tokens=timings.cached_tokens,
        status=status,
        ttft_s=None if timings.first_at is None else round(timings.first_at - sent_at, 6),
        itl_s=None if itl_s is None else round(itl_s, 9),
        e2e_s=round(timings.ended_at - sent_at, 6) if whole else None,
        error=timings.error,
        model=name if not arrival.adapter else arrival.model,
        adapter=arrival.adapter,
        blocks=arrival.blocks,
    )


async def _until(instant: float) -> None:
    """Sleep until ``instant``; yields to other tasks even if it is past."""
    await asyncio.sleep(max(instant - perf_counter(), 0.0))
