"""Reports to the controller: the totals that this worker counted per model since it started.

A report is sent every second, and at once when a request arrives for a model without replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
import msgspec

from gateway.http.internal_client import internal_client
from gateway.queue.model_queues import Admission
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.structured_log import Log
from policy.config.deployment import Deployment
from policy.types import EngineKind
from policy.wire.reports import GatewayReport, ModelReport

EVERY_S = 1.0

# Requests that arrive together wake a model by one report.
COALESCE_S = 0.05

Send = Callable[[bytes], Awaitable[None]]


@dataclass(eq=False)
class Reporter:
    """Reports of one worker.

    ``send`` posts a report, which may be lost: the next one contains its totals. ``running`` tells by
    model the running streams and their tokens so far.
    """

    metrics: Metrics
    admission: Admission
    deployment: Callable[[], Deployment]
    send: Send
    running: Callable[[], dict[str, tuple[int, int]]]

    def __post_init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._worker = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._began = self._clock()
        self._number = 0
        self._left = False

    async def run(self) -> None:
        due = self._clock()
        while True:
            self.admission.sleeping.clear()
            self.admission.woken.clear()
            await self._report()
            due = max(due + EVERY_S, self._clock())
            while await self._woken_before(due):
                await asyncio.sleep(COALESCE_S)
                await self._report()

    async def leave(self) -> None:
        """Send the last report, and none after it."""
        await self._report(last=True)

    def report(self, *, last: bool = False) -> GatewayReport:
        self._number += 1
        deployment, running = self.deployment(), self.running()
        return GatewayReport(
            worker=self._worker,
            number=self._number,
            since_s=self._clock() - self._began,
            models={
                spec.name: self._model(spec.name, running.get(spec.name, (0, 0)))
                for spec in deployment.models
                if spec.engine is not EngineKind.EXTERNAL
            },
            last=last,
        )

    async def _report(self, *, last: bool = False) -> None:
        if not self._left:
            self._left = last
            await self.send(msgspec.json.encode(self.report(last=last)))

    async def _woken_before(self, due: float) -> bool:
        try:
            async with asyncio.timeout_at(due):
                await self.admission.woken.wait()
        except TimeoutError:
            return False
        self.admission.woken.clear()
        return True

    def _model(self, name: str, running: tuple[int, int]) -> ModelReport:
        meter = self.metrics.model(name)
        return meter.totals.report(
            in_flight=meter.in_flight,
            queued=sum(meter.queue.depth.values()),
            oldest_s=self.admission.oldest_s(name),
            running=running,
            drain_s=self.admission.drain_s(name),
        )


# The longest wait for an answer.
ANSWER_TIMEOUT_S = 2.0


class ReportSender:
    """Posts messages to one path of the controller at ``address()``; one that fails is lost, and logged."""

    def __init__(self, address: Callable[[], str], path: str, secret: str, log: Log) -> None:
        self._address = address
        self._path = path
        self._log = log
        self._http = internal_client(secret, keepalive_connections=1)
        self._lost = False

    async def send(self, body: bytes) -> None:
        """Send ``body``, and wait until it is received or lost."""
        status = 0
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._http.post(f"http://{self._address()}{self._path}", content=body)
                status = answer.status_code
        lost = status != 200
        if lost and not self._lost:
            self._log.warning("report_lost", path=self._path, status=status)
        self._lost = lost

    async def close(self) -> None:
        await self._http.aclose()
