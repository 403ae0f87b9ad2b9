"""Limits of one turn of the event loop: how much of what clients and replicas send is read, what begins.

libuv reads from all connections that have data in one turn, up to 32 times each: hundreds of large uploads
or answers that come together would stop everything else for a quarter of a second. Here all reads of a turn
share a few milliseconds. A connection that has more to read waits for its next turn, and what is read when
the time is spent is processed in later ones: answers of replicas and what clients send by turns, of clients
one address after the other, and of one address the oldest and the newest by turns. So a crowd does not
delay other clients, and who comes after a crowd from the same address does not wait for all of it. The
requests that begin in a turn share such a time too, with those that go on after a failure, and of thousands
of clients that leave together some are closed in each. So are the requests of connections that were reset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final, Generic, TypeVar
from weakref import WeakKeyDictionary

# The time of a turn in which what was read is processed, half of it for what waits from earlier turns.
TURN_S: Final = 0.003
# At most in one read: of a body of known length, of what is parsed, of the chunks of an upload, and when the
# time of the turn is spent. The costliest, events or chunks of a byte, take 3 ms.
READ_BYTES: Final = 256 * 1024
PARSED_BYTES: Final = 32 * 1024
CHUNKED_BYTES: Final = 16 * 1024
LATE_BYTES: Final = 4 * 1024
# Connections that read again in one turn.
MOST_RESUMED: Final = 8
# Connections that close in one turn after their clients did: each takes 10 us, half of it in the next turn.
# So many requests end with connections that were lost: each takes 30 us, most of it in later turns.
MOST_CLOSED: Final = 64
# The time of a turn in which requests begin: until they are sent to a replica, or wait for one. A part of it
# is for new requests that are not large, so that they need not wait for others; a large one takes 2 ms.
STARTS_S: Final = 0.004
SMALL_STARTS_S: Final = 0.0025
SMALL_BYTES: Final = 32 * 1024
# Requests that waited and may begin in one turn, if there is time: a small one begins in 0.1 ms.
MOST_STARTED: Final = 32
# So many addresses of which nothing waits have a read or a start beyond the time of a turn, one each.
MOST_LATE: Final = 16

T = TypeVar("T")


class ClientQueues(Generic[T]):
    """What waits, by the address of clients: by turns one of each, and of one the oldest and the newest."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}
        # The clients of which the newest is next.
        self._newest_next: set[str] = set()
        # Those of which one was taken beyond the time of this turn.
        self._late: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, client: str, item: T) -> None:
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = deque()
        queue.append(item)

    def take(self) -> T:
        """The next one; the client's others are after those of all other clients."""
        client = next(iter(self._queues))
        queue = self._queues.pop(client)
        if client in self._newest_next:
            self._newest_next.remove(client)
            item = queue.pop()
        else:
            self._newest_next.add(client)
            item = queue.popleft()
        if queue:
            self._queues[client] = queue
        else:
            self._newest_next.discard(client)
        return item

    def may_be_late(self, client: str) -> bool:
        """Whether nothing of ``client`` waits, and this is its first one beyond the time of this turn."""
        if client in self._queues or client in self._late or len(self._late) >= MOST_LATE:
            return False
        self._late.add(client)
        return True

    def end_turn(self) -> None:
        self._late.clear()


class ReadTurns:
    """The reads of one event loop, by ``clock``. ``spent``: what is read now is processed in a later turn."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._view = memoryview(bytearray(READ_BYTES))
        self._offered = READ_BYTES
        self._has_begun = False
        self._until = 0.0
        self.spent = False
        self._answers: deque[PacedReader] = deque()
        self._requests: ClientQueues[PacedReader] = ClientQueues()
        self._resting: deque[PacedReader] = deque()
        self._left: deque[asyncio.Transport] = deque()
        self._lost: deque[Callable[[], None]] = deque()
        self._most_lost = MOST_CLOSED
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

    def may_be_late(self, client: str) -> bool:
        """Whether a read is processed although the time is spent: of an address of which nothing waits."""
        return client != "" and self._requests.may_be_late(client)

    def defer(self, reader: PacedReader) -> None:
        """Call ``reader.proceed`` in a later turn."""
        if reader.client:
            self._requests.add(reader.client, reader)
        else:
            self._answers.append(reader)

    def rest(self, reader: PacedReader) -> None:
        """Call ``reader.read_again`` in a later turn."""
        self._resting.append(reader)

    def close(self, transport: asyncio.Transport) -> None:
        """Close ``transport``, whose client sends no more, in this turn or a later one."""
        self._left.append(transport)
        if not self._has_begun:
            self._begin()

    def lose(self, end: Callable[[], None]) -> None:
        """Call ``end`` for the request of a connection that was lost: now, or later where hundreds were."""
        if not self._has_begun:
            self._begin()
        if self._most_lost and not self._lost:
            self._most_lost -= 1
            end()
        else:
            self._lost.append(end)

    def _begin(self) -> None:
        self._has_begun, self.spent = True, False
        self._until = self._clock() + TURN_S
        if (soon := self._soon) is None:  # to ask for the loop is a system call
            soon = self._soon = asyncio.get_running_loop().call_soon
        soon(self._end)

    def _end(self) -> None:
        self._has_begun = self.spent = False
        answers, requests = self._answers, self._requests
        requests.end_turn()
        self._most_lost = MOST_CLOSED
        if not (answers or requests or self._resting or self._left or self._lost):
            return
        self._begin()
        for _ in range(min(MOST_CLOSED, len(self._left))):
            self._left.popleft().close()
        while self._lost and self._most_lost:
            self._most_lost -= 1
            self._lost.popleft()()
        half = self._until - TURN_S / 2
        has_time, left = True, len(answers)
        while has_time and (left or requests):
            if left:
                left -= 1
                answers.popleft().proceed()
            if requests:
                requests.take().proceed()
            has_time = self._clock() < half
        for _ in range(min(MOST_RESUMED, len(self._resting))):
            self._resting.popleft().read_again()


class PacedReader:
    """The reads of one connection, whose protocol gets what was read by ``receive``.

    ``client``: the address of a client; empty for a connection to a replica. The protocol may pause and
    resume reading, and must close this when its connection is lost.
    """

    def __init__(
        self, transport: asyncio.Transport, receive: Callable[[bytes], None], client: str = ""
    ) -> None:
        self.client = client
        self._turns: ReadTurns | None = None
        self._transport = transport
        self._receive: Callable[[bytes], None] | None = receive
        self._unprocessed = b""
        self._has_more = self._is_resting = self._is_paused = self._is_behind = False

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
        waits = bool(self._unprocessed) or self._is_behind
        if waits or (turns.spent and not turns.may_be_late(self.client)):
            if not waits:
                turns.defer(self)
            self._unprocessed += data
            # One small read waits without a pause, which would cost two system calls: hundreds of streams may
            # have a token each.
            if len(self._unprocessed) >= LATE_BYTES and not self._is_resting:
                self._rest()
            return
        self._process(data)
        if self._is_behind:
            turns.defer(self)
            if not self._is_resting:
                self._rest()
        elif self._has_more and not self._is_resting:
            self._rest()
            turns.rest(self)

    def fall_behind(self) -> None:
        """Called within ``receive``: call it again in a later turn, with what is read until then."""
        self._is_behind = True

    def is_late(self) -> bool:
        """Within ``receive``: whether the time of the turn is spent."""
        if self._turns is None:
            return False
        self._turns.processed()
        return self._turns.spent

    def proceed(self) -> None:
        """Process what was read."""
        data, self._unprocessed = self._unprocessed, b""
        try:
            self._process(data)
        except Exception:
            self._transport.abort()
            raise
        if self._is_behind and self._turns is not None:
            self._turns.defer(self)
            return
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
        while self._is_behind:
            self._process(b"")
        self._receive = None  # it holds the protocol

    def release(self) -> bytes:
        """As :meth:`close`; returns what the protocol processes itself, with all for which it fell behind."""
        data, self._unprocessed = self._unprocessed, b""
        self._receive, self._is_behind = None, False
        return data

    def _process(self, data: bytes) -> None:
        was_behind, self._is_behind = self._is_behind, False
        if (data or was_behind) and self._receive is not None:
            self._receive(data)
        if self._turns is not None:
            self._turns.processed()

    def _rest(self) -> None:
        self._is_resting = True
        if not self._is_paused and not self._transport.is_closing():
            self._transport.pause_reading()


class RequestStarts:
    """The starts of requests on one event loop: those of a turn share :data:`STARTS_S`, the others wait.

    Of these one client after the other begins one, as :class:`ClientQueues` has it.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._has_begun = False
        self._until = 0.0
        self._waiting: ClientQueues[asyncio.Future[None]] = ClientQueues()
        # Those that were woken and for which there was no time.
        self._returned: deque[asyncio.Future[None]] = deque()
        self._soon: Callable[[Callable[[], None]], object] | None = None

    def may_begin(self, size: int, client: str) -> bool:
        """Whether a new request of ``size`` bytes may begin now; otherwise it must :meth:`wait`."""
        is_small = size <= SMALL_BYTES
        if self._has_time(0.0 if is_small else SMALL_STARTS_S):
            return True
        return is_small and self._waiting.may_be_late(client)

    async def wait(self, client: str) -> None:
        """Return when a request of ``client`` may begin, or go on, in a later turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.add(client, turn)
        self._end_soon()
        await turn
        while not self._has_time(SMALL_STARTS_S):
            turn = loop.create_future()
            self._returned.append(turn)
            await turn

    def _has_time(self, kept_s: float) -> bool:
        """Whether a request may begin in this turn: the first may."""
        if not self._until:
            self._until = self._clock() + STARTS_S
            self._end_soon()
            return True
        return self._clock() < self._until - kept_s

    def _end_soon(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        if (soon := self._soon) is None:
            soon = self._soon = asyncio.get_running_loop().call_soon
        soon(self._end)

    def _end(self) -> None:
        """Runs before the starts of a turn, and wakes requests for the next one."""
        self._until = 0.0
        self._has_begun = False
        waiting, returned = self._waiting, self._returned
        waiting.end_turn()
        if not (waiting or returned):
            return
        self._end_soon()
        woken = 0
        while woken < MOST_STARTED and (returned or waiting):
            turn = returned.popleft() if returned else waiting.take()
            if not turn.done():  # its client has not left
                turn.set_result(None)
                woken += 1


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[ReadTurns, RequestStarts]] = WeakKeyDictionary()


def read_turns() -> ReadTurns:
    """Those of the running event loop."""
    return _of_loop()[0]


def request_starts() -> RequestStarts:
    """Those of the running event loop."""
    return _of_loop()[1]


def _of_loop() -> tuple[ReadTurns, RequestStarts]:
    loop = asyncio.get_running_loop()
    if (turns := _by_loop.get(loop)) is None:
        turns = _by_loop[loop] = (ReadTurns(), RequestStarts())
    return turns
