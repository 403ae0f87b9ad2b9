"""What this worker counted of each model, told to the controller.

Once a second, and at once when a request comes for a model that has no replica: it waits until one has
started. All are totals, so what a controller that was away did not hear it hears the next time.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from gateway.admission import Admission
from gateway.metrics import Metrics
from policy.config import Deployment
from policy.reports import GatewayReport, ModelReport
from policy.types import EngineKind

EVERY_S = 1.0
# Requests that come together wake a model by one report.
COALESCE_S = 0.05

Send = Callable[[bytes], Awaitable[None]]


class Reporter:
    """One worker's. ``send`` posts a report, whatever becomes of it."""

    def __init__(
        self,
        metrics: Metrics,
        admission: Admission,
        deployment: Callable[[], Deployment],
        send: Send,
    ) -> None:
        self._metrics = metrics
        self._admission = admission
        self._deployment = deployment
        self._send = send
        self._clock = asyncio.get_running_loop().time
        self._worker = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._began = self._clock()
        self._number = 0
        self._left = False
        self._woken: set[str] = set()
        self._wake = asyncio.Event()
        admission.on_asleep = self.wake

    def wake(self, model: str) -> None:
        """Somebody asks for a model that has no replica; once between two reports is enough."""
        if model not in self._woken:
            self._woken.add(model)
            self._wake.set()

    async def run(self) -> None:
        """Tell until cancelled."""
        due = self._clock()
        while True:
            self._woken.clear()
            self._wake.clear()
            await self._tell()
            due = max(due + EVERY_S, self._clock())
            while await self._woken_before(due):
                await asyncio.sleep(COALESCE_S)
                await self._tell()

    async def leave(self) -> None:
        """Tell the last, and nothing after it."""
        await self._tell(last=True)

    def report(self, *, last: bool = False) -> GatewayReport:
        """All that was counted until now."""
        self._number += 1
        deployment = self._deployment()
        return GatewayReport(
            worker=self._worker,
            number=self._number,
            since_s=self._clock() - self._began,
            models={
                spec.name: self._model(spec.name)
                for spec in deployment.models
                if spec.engine is not EngineKind.EXTERNAL
            },
            last=last,
        )

    async def _tell(self, *, last: bool = False) -> None:
        if not self._left:
            self._left = last
            await self._send(msgspec.json.encode(self.report(last=last)))

    async def _woken_before(self, due: float) -> bool:
        try:
            async with asyncio.timeout_at(due):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    def _model(self, name: str) -> ModelReport:
        meter = self._metrics.model(name)
        return meter.totals.report(
            in_flight=meter.in_flight,
            queued=sum(self._metrics.queues.model(name).depth.values()),
            oldest_s=self._admission.waited_s(name),
        )
