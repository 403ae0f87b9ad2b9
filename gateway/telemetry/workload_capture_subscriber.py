"""A subscriber: rows from all workers of the host, as the lines of a capture."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cache
from pathlib import Path
from time import monotonic

import msgspec

from gateway.protocol.prompt_features import BLOCK_BYTES
from gateway.telemetry.workload_capture_publisher import (
    LIMITS,
    LOOK_EVERY_S,
    SUFFIX,
    BufferLimits,
    CaptureBatch,
    CaptureRow,
)
from policy.wire.capture import BLOCK_TOKENS, HEADER, CaptureLine, DroppedRows
from store.state_dir import own_directory

# Until every worker has looked for listeners.
SETTLE_S = 2 * LOOK_EVERY_S
# A quieter capture has lines without a request: clients and proxies take silence for its end.
QUIET_S = 60.0
MAX_DATAGRAM = 256 * 1024


class Pseudonyms:
    """Keys the hashes of prompts and sessions with a secret, and cuts prompts into blocks of tokens.

    ``density`` gives a model's bytes per token; called once per model, so that equal prompts keep equal
    blocks.
    """

    def __init__(self, density: Callable[[str], float], key: bytes) -> None:
        self._density = cache(density)
        self._key = key

    def line(self, row: CaptureRow, started: float) -> CaptureLine:
        """The line for ``row`` in a capture that began at ``started``."""
        return CaptureLine(
            round(row.at - started, 6),
            row.input_tokens,
            row.output_tokens,
            row.model,
            row.adapter,
            row.tenant,
            self._hidden(0, row.session) if row.session else 0,
            self._blocks(row),
        )

    def _blocks(self, row: CaptureRow) -> tuple[int, ...]:
        step = BLOCK_TOKENS * self._density(row.model) / BLOCK_BYTES
        count = min(row.input_tokens // BLOCK_TOKENS, int(len(row.grid) / step))
        ends = [max(round(step * number), 1) for number in range(1, count + 1)]
        return tuple(
            self._hidden(number, row.grid[end - 1])
            for number, end in enumerate(ends, 1)
            if end <= len(row.grid)
        )

    def _hidden(self, number: int, value: int) -> int:
        """A keyed hash of 53 bits, which every JSON reader holds exactly."""
        encoded = number.to_bytes(4) + value.to_bytes(8)
        return (int.from_bytes(hashlib.blake2b(encoded, digest_size=8, key=self._key).digest()) >> 11) or 1


class CaptureSubscribers:
    """The subscribers at one worker. ``place`` is the directory in which all workers look for them.

    A client that is ``limits`` behind the workers holds them back. After ``settle_s`` all have found it. It
    is sent a line after ``quiet_s`` without any.
    """

    def __init__(
        self,
        place: Path,
        density: Callable[[str], float],
        limits: BufferLimits = LIMITS,
        *,
        settle_s: float = SETTLE_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._place = place
        self._limits, self._settle_s, self._quiet_s = limits, settle_s, quiet_s
        self._density = density
        self._open: set[_Subscription] = set()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """A header, then a line for each request that arrives after it, when it has ended."""
        own_directory(self._place)
        pseudonyms = Pseudonyms(self._density, secrets.token_bytes(32))
        subscription = _Subscription(self._place / f"{secrets.token_hex(6)}{SUFFIX}", self._limits)
        self._open.add(subscription)
        lost = 0
        try:
            await asyncio.sleep(self._settle_s)
            started = monotonic()
            yield _encode(HEADER) + b"\n"
            while (batches := await subscription.received(self._quiet_s)) is not None:
                for batch in batches:
                    lines = [
                        _encode(pseudonyms.line(row, started)) for row in batch.rows if row.at >= started
                    ]
                    if lines:
                        yield b"\n".join(lines) + b"\n"
                    # A batch may take 5 ms, and a client that keeps up does not let others go on between two.
                    await asyncio.sleep(0)
                if not batches or subscription.lost != lost:
                    lost = subscription.lost
                    yield _encode(DroppedRows(lost)) + b"\n"
        finally:
            self._open.discard(subscription)
            subscription.close()

    def close(self) -> None:
        """End all captures after the rows that were received."""
        for subscription in self._open:
            subscription.end()


class _Subscription:
    """A subscriber's socket, and the batches that it has received and not passed on yet."""

    def __init__(self, path: Path, limits: BufferLimits) -> None:
        self._path = path
        self._limits = limits
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._batches: list[CaptureBatch] = []
        self._rows = self._hashes = 0
        self._lost: dict[int, int] = {}
        self._over = self._reading = False
        self._arrived = asyncio.Event()
        try:
            self._socket.bind(str(path))
            self._listen()
        except BaseException:
            self._socket.close()
            raise

    @property
    def lost(self) -> int:
        return sum(self._lost.values())

    async def received(self, within_s: float) -> Sequence[CaptureBatch] | None:
        """The batches since the last call, none if none came in time; ``None`` when no more will come."""
        while not self._batches:
            if self._over:
                return None
            self._arrived.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._arrived.wait()
            except TimeoutError:
                return ()
        batches, self._batches = self._batches, []
        self._rows = self._hashes = 0
        self._listen()
        return batches

    def end(self) -> None:
        if not self._over:
            self._read()
            self._over = True
            self._arrived.set()

    def close(self) -> None:
        """Remove the socket: workers stop sending to it."""
        self._pause()
        self._over = True
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _listen(self) -> None:
        if not (self._reading or self._over):
            self._loop.add_reader(self._socket.fileno(), self._read)
            self._reading = True

    def _pause(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._socket.fileno())
            self._reading = False

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._rows < self._limits.rows and self._hashes < self._limits.hashes:
                batch = _decode(self._socket.recv(MAX_DATAGRAM))
                self._batches.append(batch)
                self._rows += len(batch.rows)
                self._hashes += sum([len(row.grid) for row in batch.rows])
                self._lost[batch.pid] = batch.lost
                self._arrived.set()
            self._pause()  # until these have been passed on


_encode = msgspec.json.Encoder().encode
_decode = msgspec.msgpack.Decoder(CaptureBatch).decode
