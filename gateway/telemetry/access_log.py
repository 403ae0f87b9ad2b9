"""The access log: one JSON line for each request that has ended, if ``gateway.access_log`` is set.

It has names, numbers and the request id, never a prompt, a key or a path as the client wrote it. Lines are
written in the background twice a second, to a file of its own that is rotated by size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from store.event_loop.timer_coalescing import sleep_to_next
from store.json_log_format import Field, line
from store.log_file import RotatingLog

if TYPE_CHECKING:
    from gateway.request_context import RequestContext

WRITE_EVERY_S = 0.5
# Some 10 MB of lines that a slow disk has not taken; what comes then is counted, and not written.
MOST_WAITING = 32_768


class AccessLog:
    """The access log of one worker; ``on`` is whether requests are logged."""

    def __init__(self, path: Path, worker: int, on_lost: Callable[[int], None]) -> None:
        self.on = False
        self._path = path
        self._worker = worker
        self._on_lost = on_lost
        self._waiting: list[bytes] = []
        self._lost = 0
        self._file: RotatingLog | None = None
        self._writing = asyncio.Lock()

    def call(self, call: RequestContext, model: str, tenant: str, seconds: float) -> None:
        """Log a call of a hot route that took ``seconds``; ``model`` and ``tenant`` are empty if unknown."""
        usage, adapter, replica = call.usage, call.adapter, call.replica
        fields: dict[str, Field] = {
            "worker": self._worker,
            "request_id": call.request_id.decode(),
            "client": _address(call.client),
            "trace_id": None if call.trace is None or not call.trace.kept else call.trace.trace_id.decode(),
            "route": call.route.path,
            "model": model or None,
            "adapter": None if adapter is None else adapter.name,
            "tenant": tenant or None,
            "status": call.status or None,
            "outcome": call.outcome,
            "duration_s": round(seconds, 6),
            "queued_s": round(call.queued_s, 6),
            "prompt_tokens": None if usage is None else usage.prompt,
            "cached_tokens": None if usage is None else usage.cached,
            "output_tokens": None if usage is None else usage.completion,
            "replica": replica.decode() or None,
        }
        self._add(fields)

    def other(
        self,
        request_id: bytes,
        method: str,
        route: str,
        *,
        client: tuple[str, int] | None,
        tenant: str,
        status: int,
        seconds: float,
    ) -> None:
        """Log a request of another route; ``route`` is its template, empty if no route matched."""
        fields: dict[str, Field] = {
            "worker": self._worker,
            "request_id": request_id.decode(),
            "client": _address(client),
            "method": method,
            "route": route or None,
            "tenant": tenant or None,
            "status": status or None,
            "duration_s": round(seconds, 6),
        }
        self._add(fields)

    def unread(
        self, request_id: bytes, *, client: tuple[str, int] | None, tenant: str, status: int, outcome: str
    ) -> None:
        """Log a request that was refused before it was read; ``client`` if its head was."""
        fields: dict[str, Field] = {
            "worker": self._worker,
            "request_id": request_id.decode(),
            "client": _address(client),
            "tenant": tenant or None,
            "status": status,
            "outcome": outcome,
        }
        self._add(fields)

    async def run(self) -> None:
        """Write what waits, twice a second, until cancelled."""
        while True:
            await sleep_to_next(WRITE_EVERY_S)
            if self._waiting or self._lost:
                # A thread goes on when this is cancelled: `close` waits for it.
                await asyncio.shield(self._write_waiting())

    async def close(self) -> None:
        """Write what is left."""
        await self._write_waiting()
        if self._file is not None:
            self._file.close()

    async def _write_waiting(self) -> None:
        async with self._writing:
            if self._waiting:
                waiting, self._waiting = self._waiting, []
                # In a thread: a disk may be busy for longer than a stream can wait.
                if not await asyncio.to_thread(self._write, waiting):
                    self._lost += len(waiting)
            if self._lost:
                self._on_lost(self._lost)
                self._lost = 0

    def _add(self, fields: dict[str, Field]) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(line("info", "request", fields))
        else:
            self._lost += 1

    def _write(self, lines: list[bytes]) -> bool:
        """Whether the file took them: a full disk does not."""
        try:
            if self._file is None:
                self._file = RotatingLog(self._path)
            self._file.write(b"".join(lines))
        except OSError:
            return False
        return True


def _address(client: tuple[str, int] | None) -> str | None:
    return None if client is None else client[0]
