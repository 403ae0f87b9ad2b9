"""Open-loop clients of one gateway port: they arrive at random instants and retry after Retry-After."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.live import MODEL, Live
from tests.faults.raw_client import RawClient, Reply

RETRIES = 2
MAX_WAIT_S = 5.0


@dataclass
class ClientRequest:
    """One client's request with all its attempts; instants are seconds of the event loop."""

    asked_at: float
    ended_at: float = 0.0
    late_s: float = 0.0
    attempts: list[Reply] = field(default_factory=list)

    @property
    def served(self) -> bool:
        return self.attempts[-1].status == 200 and self.attempts[-1].error is None

    @property
    def ttft_s(self) -> float:
        last = self.attempts[-1]
        return last.arrivals[0][0] - last.asked_at


class LoadGenerator:
    """Clients that each ask for ``tokens`` tokens of a stream."""

    def __init__(self, url: str, model: str, *, tokens: int, seed: int = 1) -> None:
        self._url = url
        self._tokens = tokens
        self._body = {"model": model, "stream": True, "ignore_eos": True}
        self._rng = random.Random(seed)  # noqa: S311 - arrivals, not secrets
        self._texts = random.Random()  # noqa: S311 - prompts, not secrets
        self._loop = asyncio.get_running_loop()

    async def ask(
        self, *, retries: int = 0, key: str = "", words: int = 4, varied: bool = False
    ) -> ClientRequest:
        """One visit: at most ``retries`` more attempts, each after the time that the refusal named.

        Answers have all the same length, or lengths ``varied`` around it.
        """
        visit = ClientRequest(self._loop.time())
        content = f"{self._texts.random()}: {'say something ' * (words // 2)}"
        tokens = 1 + round(self._rng.expovariate(1 / self._tokens)) if varied else self._tokens
        body = self._body | {"max_tokens": tokens, "messages": [{"role": "user", "content": content}]}
        headers = {"connection": "close"} | ({"authorization": f"Bearer {key}"} if key else {})
        for tried in range(1 + retries):
            client = await RawClient.post(self._url, "/v1/chat/completions", body, headers)
            reply = await client.end()
            visit.attempts.append(reply)
            if reply.status not in (429, 503) or tried == retries:
                break
            wait_s = min(MAX_WAIT_S, int(reply.headers["retry-after"]))
            await asyncio.sleep(wait_s * (1 + self._rng.random()))
        visit.ended_at = self._loop.time()
        return visit

    async def open_loop(self, rate: float, seconds: float, **more: Any) -> list[ClientRequest]:
        at = self._loop.time()
        end = at + seconds
        instants: list[float] = []
        asking: list[asyncio.Task[ClientRequest]] = []
        while (at := at + self._rng.expovariate(rate)) < end:
            instants.append(at)
            await asyncio.sleep(max(0.0, at - self._loop.time()))
            asking.append(asyncio.create_task(self.ask(**{"retries": RETRIES, **more})))
        visits = list(await asyncio.gather(*asking))
        for visit, at in zip(visits, instants, strict=True):
            visit.late_s = max(0.0, visit.asked_at - at)
        return visits

    async def closed_loop(self, clients: int, seconds: float) -> float:
        end = self._loop.time() + seconds
        served = 0

        async def client() -> None:
            nonlocal served
            while self._loop.time() < end:
                visit = await self.ask()
                served += visit.served and self._loop.time() < end

        await asyncio.gather(*(client() for _ in range(clients)))
        return served / seconds


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


# Two replicas of four slots; an answer of 24 tokens takes about 0.4 s, so about 20 are served a second.
REPLICAS, SLOTS, TOKENS = 2, 4, 24


def load_generator(live: Live, seed: int = 1) -> LoadGenerator:
    return LoadGenerator(live.url, MODEL, tokens=TOKENS, seed=seed)


@asynccontextmanager
async def model_with_slo(
    root: Path,
    *,
    ttft_s: float,
    keys: Mapping[str, str] | None = None,
    slots: int = SLOTS,
    speed: float = 0.5,
) -> AsyncIterator[Live]:
    """A worker whose model has the SLO ``ttft_s``, with a tenant for each of ``keys`` (name to key)."""
    live = Live(root)
    live.models[0] |= {
        "sim": {"profile": "h100-8b", "speed": speed},
        "shapes": {"small": {"cpus": 1, "max_in_flight": slots}},
        "control": {"policy": "static", "slo": {"ttft_p95_s": ttft_s}},
    }
    live.tenants = [
        {"name": name, "keys_sha256": [hashlib.sha256(key.encode()).hexdigest()]}
        for name, key in (keys or {}).items()
    ]
    async with live.running(REPLICAS):
        yield live
