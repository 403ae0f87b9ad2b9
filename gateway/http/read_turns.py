"""Limits of one turn of the event loop: how much of what clients and replicas send is read, what begins.

libuv reads from all connections that have data in one turn, up to 32 times each: hundreds of large uploads
or answers that come together would stop everything else for a quarter of a second. Here all reads of a turn
share a few milliseconds. A connection that has more to read waits for its next turn, and what is read when
the time is spent is processed in later ones: the oldest and the newest in turns, so that who comes after a
crowd does not wait for all of it. The requests that begin in a turn share such a time too, and of thousands
of clients that leave together some are closed in each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Final
from weakref import WeakKeyDictionary

# The time of a turn in which what was read is processed, half of it for what waits from earlier turns.
TURN_S: Final = 0.004
# At most in one read: of a body of known length, of what is parsed, of the chunks of an upload, and when the
# time of the turn is spent. The costliest, events or chunks of a byte, take 3 ms.
READ_BYTES: Final = 256 * 1024
PARSED_BYTES: Final = 32 * 1024
CHUNKED_BYTES: Final = 16 * 1024
LATE_BYTES: Final = 4 * 1024
# Connections that read again in one turn.
MOST_RESUMED: Final = 8
# Connections that close in one turn after their clients did: each takes 10 us, half of it in the next turn.
MOST_CLOSED: Final = 64
# The time of a turn in which requests begin: until they are sent to a replica, or wait for one. A part of it
# is for new requests that are not large, so that they need not wait for others; a large one takes 2 ms.
STARTS_S: Final = 0.005
SMALL_STARTS_S: Final = 0.003
SMALL_BYTES: Final = 32 * 1024
# Requests that waited and may begin in one turn, if there is time: a small one begins in 0.1 ms.
MOST_STARTED: Final = 32


class ReadTurns:
    """The reads of one event loop, by ``clock``. ``spent``: what is read now is processed in a later turn."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._view = memoryview(bytearray(READ_BYTES))
        self._offered = READ_BYTES
        self._has_begun = False
        self._until = 0.0
        self.spent = False
        self._unprocessed: deque[PacedReader] = deque()
        self._resting: deque[PacedReader] = deque()
        self._left: deque[asyncio.Transport] = deque()
        self._soon: Callable[[Callable[[], None]], object] | None = None

    def buffer(self, most: int) -> memoryview:
        """The buffer of the next read, which takes at most so many bytes. All reads share it."""
        self._offered = min(most, LATE_BYTES) if self.spent else most
        return self._view[: self._offered]

    def taken(self, size: int) -> bytes:
        """What was read into the buffer."""
        if not self._has_begun:
            self._begin()
        return bytes(self._view[:size])

    def filled(self, size: int) -> bool:
        """Whether the last read took all that it could, so that there may be more."""
        return size == self._offered

    def processed(self) -> None:
        """What was read has been processed."""
        self.spent = self._clock() >= self._until

    def defer(self, reader: PacedReader) -> None:
        """Call ``reader.proceed`` in a later turn."""
        self._unprocessed.append(reader)

    def rest(self, reader: PacedReader) -> None:
        """Call ``reader.read_again`` in a later turn."""
        self._resting.append(reader)

    def close(self, transport: asyncio.Transport) -> None:
        """Close ``transport``, whose client sends no more, in this turn or a later one."""
        self._left.append(transport)
        if not self._has_begun:
            self._begin()

    def _begin(self) -> None:
        self._has_begun, self.spent = True, False
        self._until = self._clock() + TURN_S
        if (soon := self._soon) is None:  # to ask for the loop is a system call
            soon = self._soon = asyncio.get_running_loop().call_soon
        soon(self._end)

    def _end(self) -> None:
        self._has_begun = self.spent = False
        if not (self._unprocessed or self._resting or self._left):
            return
        self._begin()
        for _ in range(min(MOST_CLOSED, len(self._left))):
            self._left.popleft().close()
        half = self._until - TURN_S / 2
        for number in range(len(self._unprocessed)):
            (self._unprocessed.pop() if number % 2 else self._unprocessed.popleft()).proceed()
            if self._clock() >= half:
                break
        for _ in range(min(MOST_RESUMED, len(self._resting))):
            self._resting.popleft().read_again()


class PacedReader:
    """The reads of one connection, whose protocol gets what was read by ``receive``.

    The protocol may pause and resume reading, and must close this when its connection is lost.
    """

    def __init__(self, transport: asyncio.Transport, receive: Callable[[bytes], None]) -> None:
        self._turns: ReadTurns | None = None
        self._transport = transport
        self._receive: Callable[[bytes], None] | None = receive
        self._unprocessed = b""
        self._has_more = self._is_resting = self._is_paused = False

    def buffer(self, most: int) -> memoryview:
        """As a protocol's ``get_buffer``."""
        if self._turns is None:
            self._turns = read_turns()
        return self._turns.buffer(most)

    def updated(self, size: int) -> None:
        """As a protocol's ``buffer_updated``."""
        turns = self._turns
        assert turns is not None  # since it gave the buffer
        data = turns.taken(size)
        self._has_more = turns.filled(size)
        if turns.spent or self._unprocessed:
            if not self._unprocessed:
                turns.defer(self)
            self._unprocessed += data
            # One small read waits without a pause, which would cost two system calls: hundreds of streams may
            # have a token each.
            if len(self._unprocessed) >= LATE_BYTES and not self._is_resting:
                self._rest()
            return
        self._process(data)
        if self._has_more and not self._is_resting:
            self._rest()
            turns.rest(self)

    def proceed(self) -> None:
        """Process what was read."""
        data, self._unprocessed = self._unprocessed, b""
        try:
            self._process(data)
        except Exception:
            self._transport.abort()
            raise
        if not self._is_resting:
            return
        if self._has_more and self._turns is not None:
            self._turns.rest(self)
        else:
            self.read_again()

    def read_again(self) -> None:
        self._is_resting = False
        if not self._is_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            if not self._is_resting and not self._transport.is_closing():
                self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if not self._is_resting and not self._transport.is_closing():
                self._transport.resume_reading()

    def close(self) -> None:
        """The connection is lost: process what was read of it."""
        data, self._unprocessed = self._unprocessed, b""
        self._process(data)
        self._receive = None  # it holds the protocol

    def _process(self, data: bytes) -> None:
        if data and self._receive is not None:
            self._receive(data)
        if self._turns is not None:
            self._turns.processed()

    def _rest(self) -> None:
        self._is_resting = True
        if not self._is_paused and not self._transport.is_closing():
            self._transport.pause_reading()


class RequestStarts:
    """The starts of requests on one event loop: those of a turn share :data:`STARTS_S`, the others wait.

    Of these the oldest and the newest begin in turns, so that who comes after a crowd does not wait for all
    of it.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._has_begun = False
        self._until = 0.0
        self._waiting: deque[asyncio.Future[deque[Any]]] = deque()
        # Those that were woken and for which there was no time.
        self._oldest: deque[asyncio.Future[deque[Any]]] = deque()
        self._newest: deque[asyncio.Future[deque[Any]]] = deque()
        self._soon: Callable[[Callable[[], None]], object] | None = None

    def may_begin(self, size: int) -> bool:
        """Whether a new request of ``size`` bytes may begin now; otherwise it must :meth:`wait`."""
        return self._has_time(0.0 if size <= SMALL_BYTES else SMALL_STARTS_S)

    async def wait(self) -> None:
        """Return when the request may begin."""
        loop = asyncio.get_running_loop()
        queue = self._waiting
        while True:
            turn: asyncio.Future[deque[Any]] = loop.create_future()
            queue.append(turn)
            queue = await turn
            if self._has_time(SMALL_STARTS_S):
                return

    def _has_time(self, kept_s: float) -> bool:
        """Whether a request may begin in this turn: the first may."""
        if not self._until:
            self._until = self._clock() + STARTS_S
            if not self._has_begun:
                self._has_begun = True
                self._end_soon()
            return True
        return self._clock() < self._until - kept_s

    def _end_soon(self) -> None:
        if (soon := self._soon) is None:
            soon = self._soon = asyncio.get_running_loop().call_soon
        soon(self._end)

    def _end(self) -> None:
        """Runs before the starts of a turn, and wakes requests for the next one."""
        self._until = 0.0
        waiting = self._waiting
        waiting.extendleft(reversed(self._oldest))
        waiting.extend(reversed(self._newest))
        self._oldest.clear()
        self._newest.clear()
        self._has_begun = bool(waiting)
        if self._has_begun:
            self._end_soon()
        for number in range(min(MOST_STARTED, len(waiting))):
            turn, queue = (waiting.pop(), self._newest) if number % 2 else (waiting.popleft(), self._oldest)
            if not turn.done():  # its client has not left
                turn.set_result(queue)


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, ReadTurns] = WeakKeyDictionary()


def read_turns() -> ReadTurns:
    """Those of the running event loop."""
    loop = asyncio.get_running_loop()
    turns = _by_loop.get(loop)
    if turns is None:
        turns = _by_loop[loop] = ReadTurns()
    return turns
