"""Reports to the controller: the totals that this worker counted per model since it started.

A report is sent every second, and at once when a request arrives for a model without replicas.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from gateway.http.client import ClientConnection, ConnectionPool
from gateway.queue.model_queues import Admission
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.structured_log import Log
from policy.config.deployment import Deployment
from policy.types import EngineKind
from policy.wire.headers import SECRET_HEADER
from policy.wire.reports import GatewayReport, ModelReport

EVERY_S = 1.0

# Requests that arrive together wake a model by one report.
COALESCE_S = 0.05

Send = Callable[[bytes], Awaitable[None]]


@dataclass(eq=False)
class Reporter:
    """Reports of one worker. ``send`` posts a report; it may be lost."""

    metrics: Metrics
    admission: Admission
    deployment: Callable[[], Deployment]
    send: Send

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
        deployment = self.deployment()
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

    async def _report(self, *, last: bool = False) -> None:
        if not self._left:
            self._left = last
            await self.send(msgspec.json.encode(self.report(last=last)))

    async def _woken_before(self, due: float) -> bool:
        try:
            async with asyncio.timeout_at(due):
                await self.admission.sleeping.wait()
        except TimeoutError:
            return False
        return True

    def _model(self, name: str) -> ModelReport:
        meter = self.metrics.model(name)
        return meter.totals.report(
            in_flight=meter.in_flight,
            queued=sum(self.metrics.queues.model(name).depth.values()),
            oldest_s=self.admission.oldest_s(name),
        )


# The longest wait for an answer.
ANSWER_TIMEOUT_S = 2.0


class ReportSender:
    """Posts messages to one path of the controller at ``address()``; one that fails is lost, and logged."""

    def __init__(self, address: Callable[[], str], path: str, secret: str, log: Log) -> None:
        self._address = address
        self._path = path
        self._secret = secret
        self._log = log
        self._pool: ConnectionPool | None = None
        self._url = ""
        self._lost = False

    async def send(self, body: bytes) -> None:
        """Send ``body``, and wait until it is received or lost."""
        status = 0
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status = await self._exchange(body)
        except OSError:  # TimeoutError is one
            pass
        lost = status != 200
        if lost and not self._lost:
            self._log.warning("report_lost", path=self._path, status=status)
        self._lost = lost

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    async def _exchange(self, body: bytes) -> int:
        """The status of the answer, 0 without one. If the pooled connection is dead, it is replaced once."""
        pool = self._reach()
        head = (
            f"POST {self._path} HTTP/1.1\r\nhost: {pool.host_header.decode()}\r\n"
            f"{SECRET_HEADER}: {self._secret}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()
        pooled = pool.take()
        if pooled is not None and (status := await _Exchange(pooled).to(head, body)):
            return status
        return await _Exchange(await pool.connect()).to(head, body)

    def _reach(self) -> ConnectionPool:
        url = f"http://{self._address()}"
        if self._pool is None or url != self._url:
            self.close()
            self._pool, self._url = ConnectionPool(url, ANSWER_TIMEOUT_S, max_idle=1), url
        return self._pool


class _Exchange:
    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._status = 0
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def to(self, head: bytes, body: bytes) -> int:
        """The status of the answer to this request, 0 if the connection died."""
        try:
            self._connection.send(self, head, body)
            return await self._ended
        except asyncio.CancelledError:
            self._connection.abort(self)
            raise

    # the connection's sink

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status

    def on_data(self, data: bytes, *, complete: bool) -> None:
        if complete:
            self._end(self._status)

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        """Ignore the body."""

    def on_lost(self, *, begun: bool) -> None:
        self._end(0)

    def _end(self, status: int) -> None:
        if not self._ended.done():
            self._ended.set_result(status)
