"""A worker's side of a capture: it sends numbers about served requests, never text, to subscribers.

A subscriber is a datagram socket in a directory that all workers of the host read four times a second.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from gateway.protocol.body import RequestBody
from gateway.protocol.prompt_features import grid_of, seed_of
from gateway.request_context import RequestContext
from policy.request import Request
from policy.types import Runner
from store.event_loop.timer_coalescing import sleep_to_next

LOOK_EVERY_S = 0.25
SUFFIX = ".capture"
# A datagram may have 200 KB: so many rows, and so many hashes beside those of the row that goes over.
MAX_ROWS = 64
MAX_HASHES = 8192


class BufferLimits(NamedTuple):
    """How many rows wait for a reader that does not keep up, and how many hashes, of 44 bytes each."""

    rows: int = 10_000
    hashes: int = 1 << 20


LIMITS = BufferLimits()


class CaptureRow(msgspec.Struct, frozen=True, array_like=True):
    """A request that has ended, as sent between workers. ``at`` is its arrival by the host's monotonic clock.

    ``grid`` are hashes of the beginnings of its prompt, one each
    :data:`gateway.protocol.prompt_features.BLOCK_BYTES`. ``session`` is a hash, 0 for none.
    """

    at: float
    input_tokens: int
    output_tokens: int
    model: str
    adapter: str
    tenant: str
    session: int
    grid: tuple[int, ...]


class CaptureBatch(msgspec.Struct, frozen=True, array_like=True):
    """A datagram: ``rows`` of the worker ``pid``, which has lost ``lost`` for this subscriber so far."""

    pid: int
    lost: int
    rows: list[CaptureRow]


@dataclass(slots=True)
class _Subscriber:
    """A subscriber's socket, the rows that wait for it, with how many hashes, and how many did not fit."""

    path: Path
    waiting: deque[CaptureRow] = field(default_factory=deque)
    hashes: int = 0
    lost: int = 0


class CapturePublisher:
    """Sends the rows of one worker to the subscribers, whose sockets are in the directory ``directory``.

    What is over ``limits`` for one of them is lost, and counted.
    """

    def __init__(self, directory: Path, limits: BufferLimits = LIMITS) -> None:
        self.has_subscribers = False
        self._directory = directory
        self._limits = limits
        self._subscribers: dict[str, _Subscriber] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._closed = False

    def ended(
        self, call: RequestContext, request: Request, body: RequestBody, raw: bytes, began: float
    ) -> None:
        """Record a generated answer, even if cut short; ``began`` is its arrival by ``time.monotonic``."""
        usage = call.usage
        if usage is None or call.route.runner is not Runner.GENERATE:
            return
        adapter = request.adapter if call.adapter is None else call.adapter.name
        seed = seed_of(request.model, request.adapter, request.tenant)
        row = CaptureRow(
            began,
            max(usage.prompt if usage.exact else request.prompt_tokens, 1),
            max(usage.completion, 1),
            request.model,
            adapter,
            request.tenant,
            request.session,
            grid_of(seed, body, call.route, raw, most=MAX_HASHES),
        )
        for subscriber in self._subscribers.values():
            hashes = subscriber.hashes + len(row.grid)
            if len(subscriber.waiting) < self._limits.rows and hashes <= self._limits.hashes:
                subscriber.waiting.append(row)
                subscriber.hashes = hashes
            else:
                subscriber.lost += 1

    async def run(self) -> None:
        """Look for subscribers and send them new rows, until closed."""
        while not self._closed:
            await sleep_to_next(LOOK_EVERY_S)
            self.look()
            self.flush()

    def look(self) -> None:
        if self._closed:
            return
        try:
            names = {name for name in os.listdir(self._directory) if name.endswith(SUFFIX)}  # noqa: PTH208
        except FileNotFoundError:  # no capture was ever made
            names = set()
        except OSError:  # no descriptor for it: the subscribers stay as they were
            return
        if names != self._subscribers.keys():
            kept = self._subscribers
            self._subscribers = {
                name: kept.get(name) or _Subscriber(self._directory / name) for name in names
            }
            self.has_subscribers = bool(names)

    def flush(self) -> None:
        """Send waiting rows, as far as the subscribers' sockets take them."""
        for name, subscriber in list(self._subscribers.items()):
            try:
                while subscriber.waiting:
                    rows = _batch(subscriber.waiting)
                    self._socket.sendto(
                        _encode(CaptureBatch(os.getpid(), subscriber.lost, rows)), str(subscriber.path)
                    )
                    for _ in rows:
                        subscriber.hashes -= len(subscriber.waiting.popleft().grid)
            except BlockingIOError:  # it has not read the last ones yet
                continue
            except (
                FileNotFoundError,
                ConnectionRefusedError,
            ):  # gone; the socket of a killed worker stays behind
                with contextlib.suppress(OSError):
                    subscriber.path.unlink()
                del self._subscribers[name]
                self.has_subscribers = bool(self._subscribers)
            except OSError:  # no memory for it now
                continue

    def close(self) -> None:
        """Send the remaining rows and stop."""
        self.flush()
        self._subscribers.clear()
        self.has_subscribers = False
        self._closed = True
        self._socket.close()


def _batch(kept: deque[CaptureRow]) -> list[CaptureRow]:
    """The first rows, as many as fit into a datagram."""
    rows: list[CaptureRow] = []
    hashes = 0
    for row in kept:
        rows.append(row)
        hashes += len(row.grid)
        if len(rows) >= MAX_ROWS or hashes >= MAX_HASHES:
            break
    return rows


_encode = msgspec.msgpack.Encoder().encode
