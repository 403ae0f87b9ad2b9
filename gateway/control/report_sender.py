"""Reports to the controller: the totals that this worker counted per model since it started.

A report is sent every second, and at once when a request arrives for a model without replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.http.buffered_request import post
from gateway.http.http1_client import ConnectionPool
from gateway.queue.admission import Admission
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import Deployment
from policy.wire.controller import Controllers
from policy.wire.controller_reports import (
    GatewayReport,
    ModelReport,
    ReportAnswer,
    WaitingRequests,
    WorkerDetail,
)
from policy.wire.headers import SECRET_HEADER

EVERY_S = 1.0

# Requests that arrive together wake a model by one report.
COALESCE_S = 0.05

# What is told of a worker in detail: bounded, since it is sent every second while somebody looks.
MAX_ROUTES = 20
MAX_WAITING = 100

# Sends a report; returns the answer, or nothing if it is lost.
Send = Callable[[bytes], Awaitable[bytes]]
_ANSWER = msgspec.json.Decoder(ReportAnswer)


@dataclass(eq=False)
class Reporter:
    """Reports of one worker.

    ``send`` posts a report, which may be lost: the next one contains its totals. ``running`` tells by
    model the running streams and their tokens so far, ``routes`` the last routing decisions.
    """

    metrics: WorkerMetrics
    admission: Admission
    deployment: Callable[[], Deployment]
    send: Send
    running: Callable[[], dict[str, tuple[int, int]]]
    routes: Callable[[int], list[dict[str, Any]]]

    def __post_init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._worker = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._began = self._clock()
        self._number = 0
        self._left = False
        self._detailed = False

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

    async def report(self, *, last: bool = False) -> GatewayReport:
        specs = [spec for spec in self.deployment().models if spec.is_scaled]
        drains = {spec.name: await self.admission.drain_s(spec.name) for spec in specs}
        whole = {spec.name: await self.admission.whole_answers(spec.name) for spec in specs}
        running = self.running()  # at the instant of the totals
        for name, (answers, expected) in whole.items():
            streams, produced = running.get(name, (0, 0))
            running[name] = streams + answers, produced + expected
        self._number += 1
        return GatewayReport(
            worker=self._worker,
            number=self._number,
            since_s=self._clock() - self._began,
            models={
                spec.name: self._model(spec.name, running[spec.name], drains[spec.name]) for spec in specs
            },
            last=last,
            detail=self._detail() if self._detailed else None,
        )

    def _detail(self) -> WorkerDetail:
        waiting = Counter(
            (request.model, request.priority, request.tenant) for request in self.admission.waiting()
        )
        return WorkerDetail(
            routes=tuple(self.routes(MAX_ROUTES)),
            waiting=tuple(
                WaitingRequests(model=model, priority=priority, tenant=tenant, requests=count)
                for (model, priority, tenant), count in waiting.most_common(MAX_WAITING)
            ),
        )

    async def _report(self, *, last: bool = False) -> None:
        if not self._left:
            self._left = last
            answer = await self.send(msgspec.json.encode(await self.report(last=last)))
            with contextlib.suppress(msgspec.MsgspecError):
                self._detailed = _ANSWER.decode(answer).wants_detail

    async def _woken_before(self, due: float) -> bool:
        try:
            async with asyncio.timeout_at(due):
                await self.admission.woken.wait()
        except TimeoutError:
            return False
        self.admission.woken.clear()
        return True

    def _model(self, name: str, running: tuple[int, int], drain_s: float) -> ModelReport:
        meter = self.metrics.model(name)
        return meter.totals.report(
            in_flight=meter.in_flight,
            queued=sum(meter.queue.depth.values()),
            oldest_s=self.admission.oldest_s(name),
            running=running,
            drain_s=drain_s,
        )


# The longest wait for an answer.
ANSWER_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 64 * 1024


class ReportSender:
    """Posts messages to one path of the controller, one of ``addresses``; one that fails is lost, and logged.

    The next message is for the next one of the controllers then.
    """

    def __init__(self, addresses: str, path: str, secret: str, log: StructuredLog) -> None:
        self._controllers = Controllers(addresses)
        self._path = path
        self._log = log
        self._headers = f"{SECRET_HEADER}: {secret}\r\ncontent-type: application/json\r\n".encode()
        self._pools = {
            address: ConnectionPool(f"http://{address}", ANSWER_TIMEOUT_S, max_idle=1)
            for address in self._controllers.all
        }
        self._lost = False

    async def send(self, body: bytes) -> bytes:
        """Send ``body``, and wait until it is received or lost; returns the answer, empty if it is lost."""
        status, answered = 0, b""
        address = self._controllers.first
        pool = self._pools[address]
        headers = b"host: %b\r\n%b" % (pool.host_header, self._headers)
        with contextlib.suppress(OSError, ValueError):
            status, answered = await post(
                pool,
                self._path.encode(),
                headers,
                body,
                within_s=ANSWER_TIMEOUT_S,
                max_bytes=MAX_ANSWER_BYTES,
            )
        lost = status != 200
        if lost:
            self._controllers.failed(address)
        if lost and not self._lost:
            self._log.warning("report_lost", path=self._path, status=status)
        self._lost = lost
        return b"" if lost else answered

    def close(self) -> None:
        """Close what is kept."""
        for pool in self._pools.values():
            pool.close()
