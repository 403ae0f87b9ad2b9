"""One gateway worker over simulated engines with few slots, for crowds."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.faults.crowd import Crowd
from tests.gateway.engines import SimReplica
from tests.gateway.worker import Stack, model

# Two replicas of four slots; an answer of 24 tokens takes about 0.4 s, so about 20 are served a second.
REPLICAS, SLOTS, TOKENS = 2, 4, 24


def crowd(stack: Stack, seed: int = 1) -> Crowd:
    """Clients that arrive when those of the same seed do."""
    return Crowd(stack.url, "alpha", tokens=TOKENS, seed=seed)


@asynccontextmanager
async def opened(root: Path, *, ttft_s: float, keys: Mapping[str, str] | None = None) -> AsyncIterator[Stack]:
    """A worker whose model has the SLO ``ttft_s``, with a tenant for each of ``keys`` (name to key)."""
    stack = Stack(root)
    stack.models = [model("alpha", control={"slo": {"ttft_p95_s": ttft_s}})]
    stack.tenants = [
        {"name": name, "keys_sha256": [hashlib.sha256(key.encode()).hexdigest()]}
        for name, key in (keys or {}).items()
    ]
    engines = [SimReplica(f"sim-{i}", "h100-8b", speed=0.5, bound=SLOTS) for i in range(REPLICAS)]
    try:
        await stack.start_controller()
        await asyncio.gather(stack.start_worker(), *(engine.start() for engine in engines))
        await stack.ready(*engines)  # type: ignore[arg-type]
        yield stack
    finally:
        for engine in engines:
            await engine.stop()
        await stack.close()
