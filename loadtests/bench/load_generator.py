"""A load generator: closed and open loop.

Every answer is compared with the expected bytes; any other answer counts as an error, not as a latency.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat, takewhile
from time import perf_counter
from typing import Any

from tidegate.replay.http_client import ReplayConnection

GRACE_S = 30.0
# Of a closed loop, whose duration is not known before.
CLOSED_LOOP_S = 600.0


@dataclass(slots=True)
class LoadResult:
    """The result of a run. Latencies are seconds from the instant at which a request was due.

    ``wrong`` counts errors: another ``status`` than 200, a body that ``differs``, a stream that ended with an
    ``error_event`` or was ``cut``, a connection ``refused``, and ``unanswered`` requests.
    """

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    sample: str = ""
    wall_s: float = 0.0


class _Answer:
    """The body of one answer and the instants of its reads."""

    def __init__(self) -> None:
        self.body = b""
        self.read_at: list[float] = []

    def sent(self, at: float) -> None: ...

    def feed(self, data: bytes, at: float) -> None:
        self.body += data
        self.read_at.append(at)


class LoadGenerator:
    """Requests to one port until all were answered; make one for each run.

    ``request(i)`` is the i-th request's bytes.
    """

    def __init__(self, port: int, request: Callable[[int], bytes], expected: bytes) -> None:
        self._port = port
        self._request = request
        self._expected = expected
        self._result = LoadResult()
        self._idle: list[ReplayConnection] = []

    async def closed(self, count: int, clients: int) -> LoadResult:
        """``count`` requests by ``clients``, each of which sends the next after an answer."""
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:
                await self._send(number, perf_counter())

        async def run() -> None:
            await asyncio.gather(*(client() for _ in range(clients)))

        return await self._run(run(), count, clients, CLOSED_LOOP_S)

    async def open(self, due: Sequence[float], clients: int = 32) -> LoadResult:
        """A request at each of ``due``, seconds from now in order, independent of earlier ones."""

        async def run() -> None:
            began = perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for number, at in enumerate(due):
                    if (delay := began + at - perf_counter()) > 0:
                        await asyncio.sleep(delay)
                    tasks.create_task(self._send(number, began + at))

        return await self._run(run(), len(due), clients, due[-1] if due else 0.0)

    async def _run(
        self, work: Coroutine[Any, Any, None], count: int, clients: int, expected_s: float
    ) -> LoadResult:
        result = self._result
        self._idle = [await self._connect() for _ in range(clients)]
        began = perf_counter()
        try:
            await asyncio.wait_for(work, expected_s + GRACE_S)
        except TimeoutError:
            result.wrong["unanswered"] += count - result.answered - result.wrong.total()
        result.wall_s = perf_counter() - began
        for connection in self._idle:
            connection.abort()
        return result

    async def _send(self, number: int, due: float) -> None:
        try:
            connection = self._open_connection() or await self._connect()
        except OSError:
            self._result.wrong["refused"] += 1
            return
        answer = _Answer()
        try:
            status = await connection.exchange(self._request(number), answer)
        except OSError:
            self._result.wrong["cut"] += 1
            return
        if connection.open:
            self._idle.append(connection)
        self._count(status, answer, due)

    def _count(self, status: int, answer: _Answer, due: float) -> None:
        result = self._result
        if status == 200 and answer.body == self._expected:
            result.answered += 1
            result.ttft.append(answer.read_at[0] - due)
            result.itl += [later - earlier for earlier, later in pairwise(answer.read_at)]
            return
        end = answer.body[-2048:]
        result.sample = f"{status} {end[-300:]!r}"
        differs = "error_event" if b'"error"' in end else "differs"
        result.wrong["status" if status != 200 else differs] += 1

    def _open_connection(self) -> ReplayConnection | None:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        return None

    async def _connect(self) -> ReplayConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(ReplayConnection, "127.0.0.1", self._port)
        return connection


def paced(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Poisson arrivals: when each request is due, in seconds."""
    arrivals = accumulate(rng.expovariate(rate) for _ in repeat(None))
    return list(takewhile(lambda at: at < seconds, arrivals))
