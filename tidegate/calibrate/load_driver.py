"""Clients in a closed loop: each sends its next request when its last has ended."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from policy.errors import PreconditionFailed
from sim.arrivals import Arrival
from sim.calibration.experiment_design import CalibrationPoint, RequestLatency
from tidegate.replay.endpoint_api import RequestFormat, send
from tidegate.replay.http_client import ReplayConnectionPool
from tidegate.replay.prompts import PromptGenerator
from tidegate.replay.response_timing import StreamTimings

# Delay of a client after a failed request.
REFUSED_S = 0.1


class DriveResult(NamedTuple):
    """A load point with the lengths that the endpoint counted; ``refused`` is the first error, if any."""

    point: CalibrationPoint
    seconds: float
    latencies: list[RequestLatency]
    refused: str


@dataclass(frozen=True)
class CalibrationLoad:
    """Drives one endpoint, with prompts that share no prefix, so that no cache helps."""

    pool: ReplayConnectionPool
    request_format: RequestFormat
    prompts: PromptGenerator
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def drive(self, point: CalibrationPoint, replicas: int, over: Awaitable[object]) -> DriveResult:
        """Run the clients of ``point`` for each of ``replicas`` until ``over`` ends, then cancel them.

        Raises :class:`policy.errors.PreconditionFailed` if requests fail and none succeeds.
        """
        answered: list[StreamTimings] = []
        refused: list[str] = []
        start = perf_counter()
        clients = [
            asyncio.create_task(self._client(point, answered, refused))
            for _ in range(point.concurrency * replicas)
        ]
        try:
            await over
        finally:
            for client in clients:
                client.cancel()
            await asyncio.wait(clients)
        duration_s = perf_counter() - start
        for client in clients:
            if not client.cancelled():
                client.result()  # raises errors that no endpoint causes
        if refused and not answered:
            raise PreconditionFailed(f"{point.description}: every request failed: {refused[0]}")
        for name in ("input_tokens", "output_tokens"):
            if counted := [tokens for timings in answered if (tokens := getattr(timings, name))]:
                point = point._replace(**{name: round(statistics.median(counted))})
        latencies = [
            RequestLatency(timings.first_at - timings.sent_at, timings.itl_s() or 0.0)
            for timings in answered
            if timings.first_at is not None
        ]
        return DriveResult(point, duration_s, latencies, refused[0] if refused else "")

    async def _client(
        self, point: CalibrationPoint, answered: list[StreamTimings], refused: list[str]
    ) -> None:
        while True:
            wanted = Arrival(0.0, point.input_tokens, point.output_tokens)
            text = self.prompts.text(wanted, next(self._numbers))
            body = self.request_format.body(self.request_format.model, text, point.output_tokens)
            _, timings = await send(self.pool, self.request_format.path, body)
            if timings.error:
                refused.append(timings.error)
                await asyncio.sleep(REFUSED_S)
            else:
                answered.append(timings)
