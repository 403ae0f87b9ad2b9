"""One gateway worker over simulated engines that are full soon, for crowds."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.faults.crowd import Crowd
from tests.gateway.engines import SimReplica
from tests.gateway.worker import Stack, model

# Two replicas of four slots; an answer of 24 tokens takes about 0.4 s, so about 20 are served a second.
REPLICAS, SLOTS, TOKENS = 2, 4, 24


class Site(Stack):
    """The worker, its engines, and a crowd at its door."""

    def __init__(self, root: Path, ttft_s: float | None, keys: Mapping[str, str]) -> None:
        super().__init__(root)
        self.models = [model("alpha", control={"slo": {"ttft_p95_s": ttft_s}})]
        self.tenants = [
            {"name": name, "keys_sha256": [hashlib.sha256(key.encode()).hexdigest()]}
            for name, key in keys.items()
        ]
        self.engines = [SimReplica(f"sim-{i}", "h100-8b", speed=0.5, bound=SLOTS) for i in range(REPLICAS)]

    async def start(self) -> None:
        """Until the worker would send requests to all engines."""
        await self.start_controller()
        await asyncio.gather(self.start_worker(), *(engine.start() for engine in self.engines))
        await self.ready(*self.engines)  # type: ignore[arg-type]
        self.crowd = self.another_crowd(1)

    def another_crowd(self, seed: int) -> Crowd:
        """Clients that come when those of the same seed do."""
        return Crowd(self.client_socket.getsockname()[1], "alpha", tokens=TOKENS, seed=seed)

    @property
    def memory(self) -> int:
        """Bytes of the worker that are resident."""
        return int(psutil.Process(self.workers[0].pid).memory_info().rss)

    async def close(self) -> None:
        for engine in self.engines:
            await engine.stop()
        await super().close()


@asynccontextmanager
async def opened(
    root: Path, *, ttft_s: float | None = None, keys: Mapping[str, str] | None = None
) -> AsyncIterator[Site]:
    """A site with a tenant for each of ``keys``, which are those of its clients by name.

    ``ttft_s`` is the time to the first token that its model promises.
    """
    site = Site(root, ttft_s, keys or {})
    try:
        await site.start()
        yield site
    finally:
        await site.close()
