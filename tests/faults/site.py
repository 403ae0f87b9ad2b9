"""Two simulated engines with few slots behind one gateway worker, for crowds."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.faults.crowd import Crowd
from tests.faults.live import MODEL, Live

# Two replicas of four slots; an answer of 24 tokens takes about 0.4 s, so about 20 are served a second.
REPLICAS, SLOTS, TOKENS = 2, 4, 24


def crowd(live: Live, seed: int = 1) -> Crowd:
    """Clients that arrive when those of the same seed do."""
    return Crowd(live.url, MODEL, tokens=TOKENS, seed=seed)


@asynccontextmanager
async def opened(root: Path, *, ttft_s: float, keys: Mapping[str, str] | None = None) -> AsyncIterator[Live]:
    """A worker whose model has the SLO ``ttft_s``, with a tenant for each of ``keys`` (name to key)."""
    live = Live(root)
    live.models[0] |= {
        "sim": {"profile": "h100-8b", "speed": 0.5},
        "shapes": {"small": {"cpus": 1, "max_in_flight": SLOTS}},
        "control": {"policy": "static", "slo": {"ttft_p95_s": ttft_s}},
    }
    live.tenants = [
        {"name": name, "keys_sha256": [hashlib.sha256(key.encode()).hexdigest()]}
        for name, key in (keys or {}).items()
    ]
    async with live.running(REPLICAS):
        yield live
