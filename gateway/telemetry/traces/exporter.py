"""Sends the traces of requests that have ended by OTLP over HTTP, off the event loop.

OpenTelemetry's SDK is imported when the first trace is sent, in a thread: a gateway without traces has none
of it. The environment variables of its exporters apply, such as ``OTEL_EXPORTER_OTLP_HEADERS`` and
``OTEL_RESOURCE_ATTRIBUTES``.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from gateway.telemetry.traces.tracer import EndedRequest, Tracer
from policy.config.tracing import traces_url
from store.event_loop.timer_coalescing import sleep_to_next

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from gateway.telemetry.traces.spans import SpanBuilder

SEND_EVERY_S = 1.0
TIMEOUT_S = 5.0
# The most traces of one message.
CHUNK = 64
# Read at once: metadata that could not be read, such as without a file descriptor, is not read again.
_VERSION = metadata.version("tidegate")


class TraceExporter:
    """Sends what its ``tracer`` has kept.

    ``on_lost`` is told how many traces were lost, and the error if one was the cause.
    """

    def __init__(
        self, worker: int, rng: random.Random, on_lost: Callable[[int, Exception | None], None]
    ) -> None:
        self.tracer = Tracer(rng)
        self._worker = worker
        self._on_lost = on_lost
        self._endpoint = ""
        self._sdk: tuple[SpanExporter, SpanBuilder] | None = None
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Send once a second, until cancelled."""
        while True:
            await sleep_to_next(SEND_EVERY_S)
            if self.tracer.waiting or self.tracer.lost:
                # A thread goes on when this is cancelled: `close` waits for it.
                await asyncio.shield(self.flush())

    async def flush(self) -> None:
        """Send what waits now."""
        async with self._sending:
            tracer = self.tracer
            waiting = [tracer.waiting.popleft() for _ in range(len(tracer.waiting))]
            lost, tracer.lost = tracer.lost, 0
            endpoint = tracer.settings.endpoint
            cause: Exception | None = None
            if waiting:
                unsent, cause = await asyncio.to_thread(self._send, endpoint, waiting)
                lost += unsent
            if lost:
                self._on_lost(lost, cause)

    async def close(self) -> None:
        """Send what is left."""
        await self.flush()
        if self._sdk is not None:
            self._sdk[0].shutdown()

    def _send(self, endpoint: str, requests: Sequence[EndedRequest]) -> tuple[int, Exception | None]:
        """Send the traces; returns how many were lost, and by which error if by one.

        After a failure the rest is not tried.
        """
        sent = 0
        try:
            from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415 - see the module's docstring

            exporter, builder = self._connected(endpoint)
            for begin in range(0, len(requests), CHUNK):
                # Anew each time: the system's clock may be set.
                epoch_ns = time.time_ns() - time.monotonic_ns()
                chunk = requests[begin : begin + CHUNK]
                if exporter.export(builder.build(chunk, epoch_ns)) is not SpanExportResult.SUCCESS:
                    break
                sent += len(chunk)
        except Exception as error:  # noqa: BLE001 - a lack of descriptors fails an import: serving needs no traces
            return len(requests) - sent, error
        return len(requests) - sent, None

    def _connected(self, endpoint: str) -> tuple[SpanExporter, SpanBuilder]:
        if self._sdk is None or endpoint != self._endpoint:
            if self._sdk is not None:
                self._sdk[0].shutdown()
                self._sdk = None
            self._endpoint, self._sdk = endpoint, _connect(endpoint, self._worker)
        return self._sdk


def _connect(endpoint: str, worker: int) -> tuple[SpanExporter, SpanBuilder]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

    from gateway.telemetry.traces.spans import SpanBuilder  # noqa: PLC0415

    resource = Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "tidegate-gateway"),
            "service.version": _VERSION,
            "service.instance.id": f"gateway-{worker}",
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
        }
    )
    return OTLPSpanExporter(traces_url(endpoint), timeout=TIMEOUT_S), SpanBuilder(resource)
