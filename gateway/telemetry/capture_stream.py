"""A listener: what all workers of the host tell of their requests, as the lines of a capture."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from gateway.protocol.prompt_hash import BLOCK_BYTES
from gateway.telemetry.capture import LOOK_EVERY_S, SUFFIX, CaptureBatch, Row
from policy.wire.capture import BLOCK_TOKENS, HEADER, CaptureLine, DroppedRows
from store.state_dir import own_directory

# Until every worker has looked for listeners.
HEARD_AFTER_S = 2 * LOOK_EVERY_S
MAX_DATAGRAM = 256 * 1024
# A client that reads slower than this many lines behind the workers holds them back.
MAX_LINES = 10_000


class Pseudonyms:
    """Hides which prompts and sessions were meant, and cuts prompts into blocks of tokens.

    ``density`` says how many bytes make a token of a model. It is asked once: blocks that moved with what a
    worker learns would be of equal prompts and differ.
    """

    def __init__(self, density: Callable[[str], float], key: bytes) -> None:
        self._density = density
        self._key = key
        self._densities: dict[str, float] = {}

    def line(self, row: Row, started: float) -> CaptureLine:
        """What is told of ``row`` to one who listens since ``started``."""
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

    def _blocks(self, row: Row) -> tuple[int, ...]:
        density = self._densities.get(row.model)
        if density is None:
            density = self._densities[row.model] = self._density(row.model)
        step = BLOCK_TOKENS * density / BLOCK_BYTES
        count = min(row.input_tokens // BLOCK_TOKENS, int(len(row.grid) / step))
        ends = [max(round(step * number), 1) for number in range(1, count + 1)]
        return tuple(
            self._hidden(number, row.grid[end - 1])
            for number, end in enumerate(ends, 1)
            if end <= len(row.grid)
        )

    def _hidden(self, number: int, value: int) -> int:
        """53 bits, which every reader of JSON has exactly."""
        said = number.to_bytes(4) + value.to_bytes(8)
        return (int.from_bytes(hashlib.blake2b(said, digest_size=8, key=self._key).digest()) >> 11) or 1


class Subscribers:
    """Those who capture at one worker. ``place`` is where all workers look for them."""

    def __init__(self, place: Path, density: Callable[[str], float]) -> None:
        self._place = place
        self._density = density
        self._open: set[_Ear] = set()

    async def lines(self) -> AsyncIterator[bytes]:
        """A header, then a line for each request that comes after it, when it has ended."""
        own_directory(self._place)
        veil = Pseudonyms(self._density, secrets.token_bytes(32))
        ear = _Ear(self._place / f"{secrets.token_hex(6)}{SUFFIX}")
        self._open.add(ear)
        lost = 0
        try:
            await asyncio.sleep(HEARD_AFTER_S)
            started = monotonic()
            yield _encode(HEADER) + b"\n"
            while (parcels := await ear.heard()) is not None:
                lines = [
                    _encode(veil.line(row, started))
                    for parcel in parcels
                    for row in parcel.rows
                    if row.at >= started
                ]
                if ear.lost != lost:
                    lost = ear.lost
                    lines.append(_encode(DroppedRows(lost)))
                if lines:
                    yield b"\n".join(lines) + b"\n"
        finally:
            self._open.discard(ear)
            ear.close()

    def close(self) -> None:
        """End all captures with what was heard."""
        for ear in self._open:
            ear.hang_up()


class _Ear:
    """A listener's socket, and what it has heard and not told yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._parcels: list[CaptureBatch] = []
        self._rows = 0
        self._lost: dict[int, int] = {}
        self._over = self._reading = False
        self._stirred = asyncio.Event()
        try:
            self._socket.bind(str(path))
            self._listen()
        except BaseException:
            self._socket.close()
            raise

    @property
    def lost(self) -> int:
        """Requests that workers could not tell it."""
        return sum(self._lost.values())

    async def heard(self) -> Sequence[CaptureBatch] | None:
        """What came since the last call, ``None`` when nothing will come any more."""
        while not self._parcels:
            if self._over:
                return None
            self._stirred.clear()
            await self._stirred.wait()
        parcels, self._parcels = self._parcels, []
        self._rows = 0
        self._listen()
        return parcels

    def hang_up(self) -> None:
        """Hear what is there, and nothing more."""
        if not self._over:
            self._read()
            self._over = True
            self._stirred.set()

    def close(self) -> None:
        """Leave: workers send no more."""
        self._deafen()
        self._over = True
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _listen(self) -> None:
        if not (self._reading or self._over):
            self._loop.add_reader(self._socket.fileno(), self._read)
            self._reading = True

    def _deafen(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._socket.fileno())
            self._reading = False

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._rows < MAX_LINES:
                parcel = _decode(self._socket.recv(MAX_DATAGRAM))
                self._parcels.append(parcel)
                self._rows += len(parcel.rows)
                self._lost[parcel.pid] = parcel.lost
                self._stirred.set()
            self._deafen()  # until these have been told


_encode = msgspec.json.Encoder().encode
_decode = msgspec.msgpack.Decoder(CaptureBatch).decode
