"""Many clients at once, arriving as they please: an open loop, whose cost is small beside a gateway's."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

RETRIES = 2
MAX_WAIT_S = 5.0
PATIENCE_S = 30.0


@dataclass
class Attempt:
    """One try: its status, when its head came and its first event, in seconds after it was sent."""

    status: int = 0
    head_s: float = 0.0
    first_s: float | None = None
    retry_after_s: int | None = None
    code: str | None = None
    whole: bool = False


@dataclass
class Visit:
    """One client's request with all its tries; ``asked_at`` and ``ended_at`` are loop times.

    ``late_s`` is how much later than it meant to this process asked: what the machine makes of 0 seconds.
    """

    tenant: str
    asked_at: float
    ended_at: float = 0.0
    late_s: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def served(self) -> Attempt | None:
        last = self.attempts[-1]
        return last if last.status == 200 and last.whole else None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, of the try that was served."""
        assert self.served is not None
        assert self.served.first_s is not None
        return self.served.first_s


class _Wire(asyncio.Protocol):
    """A connection for one attempt; closed by the server when it is over."""

    def __init__(self, request: bytes, attempt: Attempt, now: Callable[[], float]) -> None:
        self._request = request
        self._attempt = attempt
        self._now = now
        self._data = bytearray()
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._sent = self._now()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        attempt = self._attempt
        self._data += data
        if not attempt.status and b"\r\n\r\n" in self._data:
            attempt.head_s = self._now() - self._sent
            attempt.status = int(self._data[9:12])
        if attempt.first_s is None and attempt.status == 200 and b"data: " in self._data:
            attempt.first_s = self._now() - self._sent

    def connection_lost(self, exc: Exception | None) -> None:
        head, _, body = bytes(self._data).partition(b"\r\n\r\n")
        attempt = self._attempt
        attempt.whole = b"[DONE]" in body
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"retry-after: "):
                attempt.retry_after_s = int(line.rpartition(b" ")[2])
        if attempt.status not in (0, 200):
            attempt.code = json.loads(body)["error"]["code"]
        if not self.over.done():
            self.over.set_result(None)


class Crowd:
    """Clients of one gateway port; each asks for ``tokens`` tokens of a stream.

    Two of one ``seed`` come at the same instants, but never with the same prompts: those are cached.
    """

    def __init__(self, port: int, model: str, *, tokens: int, seed: int = 1) -> None:
        self._port = port
        self._body = {"model": model, "stream": True, "max_tokens": tokens, "ignore_eos": True}
        self._rng = random.Random(seed)  # noqa: S311 - arrivals, not secrets
        self._texts = random.Random()  # noqa: S311 - prompts, not secrets
        self._loop = asyncio.get_running_loop()

    async def ask(self, tenant: str = "", *, retries: int = 0, key: str = "", words: int = 4) -> Visit:
        """One visit: at most ``retries`` more tries, each after the time that it was told."""
        visit = Visit(tenant, self._loop.time())
        content = f"{self._texts.random()}: {'say something ' * (words // 2)}"
        raw = json.dumps(self._body | {"messages": [{"role": "user", "content": content}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
        head += "connection: close\r\n"
        if key:
            head += f"authorization: Bearer {key}\r\n"
        request = head.encode() + b"\r\n" + raw
        for tried in range(1 + retries):
            attempt = Attempt()
            visit.attempts.append(attempt)
            _, wire = await self._loop.create_connection(
                lambda attempt=attempt: _Wire(request, attempt, self._loop.time),  # type: ignore[misc]
                "127.0.0.1",
                self._port,
            )
            await asyncio.wait_for(wire.over, PATIENCE_S)
            if attempt.status not in (429, 503) or tried == retries:
                break
            await asyncio.sleep(min(MAX_WAIT_S, attempt.retry_after_s or 1) * (1 + self._rng.random()))
        visit.ended_at = self._loop.time()
        return visit

    async def open_loop(self, rate: float, seconds: float, tenant: str = "", **more: Any) -> list[Visit]:
        """Visits at Poisson instants, ``rate`` a second, whatever becomes of them."""
        end = self._loop.time() + seconds
        at = self._loop.time()
        instants: list[float] = []
        asking: list[asyncio.Task[Visit]] = []
        while (at := at + self._rng.expovariate(rate)) < end:
            instants.append(at)
            await asyncio.sleep(max(0.0, at - self._loop.time()))
            asking.append(asyncio.create_task(self.ask(tenant, **{"retries": RETRIES, **more})))
        visits = list(await asyncio.gather(*asking))
        for visit, at in zip(visits, instants, strict=True):
            visit.late_s = max(0.0, visit.asked_at - at)
        return visits

    async def closed_loop(self, clients: int, seconds: float) -> float:
        """Served visits per second of ``clients`` that ask again at once."""
        end = self._loop.time() + seconds
        served = 0

        async def client() -> None:
            nonlocal served
            while self._loop.time() < end:
                visit = await self.ask()
                served += visit.served is not None and self._loop.time() < end

        await asyncio.gather(*(client() for _ in range(clients)))
        return served / seconds


def jain(shares: Sequence[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has all."""
    return float(sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)))
