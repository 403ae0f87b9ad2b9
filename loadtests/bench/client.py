"""A load generator on uvloop protocols that leaves its core to the upstream: closed and open loop.

Every answer is compared with the expected bytes; any other answer counts as an error, not as a latency.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat, takewhile
from time import perf_counter
from typing import Literal, cast

from tidegate.replay.http_client import Response

Outcome = Literal["ok", "status", "differs", "told", "cut", "refused"]
MAX_OPEN = 4096
GRACE_S = 30.0


@dataclass(slots=True)
class Result:
    """The result of a run. Times are seconds; ``ttft`` is from the moment a request was due.

    ``wrong`` counts errors: another ``status`` than 200, a body that ``differs``, a stream that ended with an
    error event (``told``) or was ``cut``, a connection ``refused``.
    """

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    due: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)
    sample: str = ""
    wall_s: float = 0.0

    @property
    def ok(self) -> int:
        """The number of correct answers."""
        return len(self.e2e)


class Connection(asyncio.Protocol):
    """A kept connection with one request at a time; its load gets it back afterwards."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._response = Response(self._feed)
        self.busy = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.lost(self)
        if self.busy:
            self._end("cut")

    def ask(self, request: bytes, due: float) -> None:
        """Send ``request``, which was due at ``due`` in ``perf_counter`` seconds."""
        self.busy = True
        self._due = due
        self._last = 0.0
        self._parts: list[bytes] = []
        self._response = Response(self._feed)
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        response = self._response
        response.read(data, now)
        if response.complete:
            self._load.result.e2e.append(now - self._due)
            if not response.keep_alive:
                self.transport.close()
                self._load.lost(self)
            self._end(self._verdict(response.status))

    def _feed(self, data: bytes, at: float) -> None:
        if self._last:
            self._load.result.itl.append(at - self._last)
        else:
            self._load.result.ttft.append(at - self._due)
        self._last = at
        self._parts.append(data)

    def _verdict(self, status: int) -> Outcome:
        body = b"".join(self._parts)
        if status == 200 and body == self._load.expected:
            return "ok"
        self._load.result.e2e.pop()
        self._load.result.sample = f"{status} {body[-300:]!r}"
        if status != 200:
            return "status"
        return "told" if b'"error"' in body[-2048:] else "differs"

    def _end(self, outcome: Outcome) -> None:
        self.busy = False
        self._load.ended(self, outcome, self._due)


class Load:
    """Requests to one port until all were answered; make one for each run, inside the event loop.

    ``request(i)`` is the i-th request's bytes.
    """

    def __init__(self, port: int, request: Callable[[int], bytes], expected: bytes) -> None:
        self._port = port
        self._request = request
        self.expected = expected
        self.result = Result()
        self._idle: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._asked = self._count = self._left = 0
        self._closed = False
        self._due: Sequence[float] = ()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def closed(self, count: int, clients: int) -> Result:
        """``count`` requests by ``clients``, each of which sends the next after an answer."""
        self._closed, self._count, self._left = True, count, count
        for _ in range(clients):
            await self._connect()
        began = perf_counter()
        for connection in list(self._all):
            self._again(connection)
        return await self._finish(began)

    async def open(self, due: Sequence[float], clients: int = 32) -> Result:
        """A request at each of ``due``, seconds from now in order, independent of earlier ones."""
        self._count = self._left = len(due)
        for _ in range(clients):
            self._idle.append(await self._connect())
        began = perf_counter()
        self._due = [began + each for each in due]
        self._tick()
        return await self._finish(began)

    async def _finish(self, began: float) -> Result:
        span = self._due[-1] - began if self._due else 600.0
        try:
            await asyncio.wait_for(self._done, span + GRACE_S)
        except TimeoutError:
            self.result.wrong["unanswered"] += self._left
        self.result.wall_s = perf_counter() - began
        self._left = 0
        for connection in list(self._all):
            connection.transport.abort()
        return self.result

    def ended(self, connection: Connection, outcome: Outcome, due: float) -> None:
        """Called by a connection whose request ended."""
        if not self._left:
            return
        if outcome == "ok":
            self.result.due.append(due)
        else:
            self.result.wrong[outcome] += 1
        self._left -= 1
        if not self._left:
            self._done.set_result(None)
        elif connection not in self._all:
            if self._closed:
                self._spawn(None)
        elif self._closed:
            self._again(connection)
        else:
            self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        """Called by a connection that was closed."""
        self._all.discard(connection)
        if not connection.busy and self._closed and self._left:
            self._spawn(None)

    def _again(self, connection: Connection) -> None:
        if self._asked < self._count:
            self._asked += 1
            connection.ask(self._request(self._asked - 1), perf_counter())

    def _tick(self) -> None:
        now = perf_counter()
        while self._asked < self._count and self._due[self._asked] <= now:
            index, self._asked = self._asked, self._asked + 1
            connection = self._taken()
            if connection is None:
                self._spawn(index)
            else:
                connection.ask(self._request(index), self._due[index])
        if self._asked < self._count and self._left:
            delay = max(0.0, self._due[self._asked] - perf_counter())
            asyncio.get_running_loop().call_later(delay, self._tick)

    def _taken(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection in self._all and not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> Connection:
        _, made = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self), "127.0.0.1", self._port
        )
        self._all.add(made)
        return made

    def _spawn(self, index: int | None) -> None:
        """A new connection in the background, for the request that is due or, closed loop, the next."""
        task = asyncio.get_running_loop().create_task(self._connect())

        def connected(task: asyncio.Task[Connection]) -> None:
            if task.cancelled() or task.exception() is not None:
                self.result.wrong["refused"] += 1
                self._left -= 1
                if self._left <= 0 and not self._done.done():
                    self._done.set_result(None)
            elif index is not None:
                task.result().ask(self._request(index), self._due[index])
            else:
                self._again(task.result())

        task.add_done_callback(connected)


def paced(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Poisson arrivals: when each request is due, in seconds."""
    arrivals = accumulate(rng.expovariate(rate) for _ in repeat(None))
    return list(takewhile(lambda at: at < seconds, arrivals))
