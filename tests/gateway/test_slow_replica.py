"""A replica that is five times slower than its like gets so much less, and nobody waits for it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.gateway.engines import SimReplica
from tests.gateway.test_prediction import PROFILE, WARM_UP, Client
from tests.gateway.worker import Stack

# tests/faults has the same of replicas that are told what to do, in each run.
pytestmark = pytest.mark.long

REPLICAS, SPEED, RATE, SECONDS = 4, 0.4, 8.0, 25.0


class Timed(Client):
    """Notes the seconds to the first event of each chat."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.first_s: list[float] = []

    async def answered(self, reader: asyncio.StreamReader) -> None:
        began = time.monotonic()
        status = await reader.readline()
        assert b" 200 " in status, status
        await reader.readuntil(b"data: ")
        self.first_s.append(time.monotonic() - began)
        await reader.readuntil(b"data: [DONE]\n\n")


async def p99(root: Path, slowest: float) -> tuple[float, float]:
    """The 99th percentile of the time to the first token in seconds, and the last replica's share.

    The last of the replicas runs ``slowest`` times as fast as the others.
    """
    stack = Stack(root)
    speeds = [SPEED] * (REPLICAS - 1) + [SPEED * slowest]
    replicas = [SimReplica(f"r{i}", PROFILE, speed=speed) for i, speed in enumerate(speeds)]
    try:
        await stack.start_controller()
        await asyncio.gather(stack.start_worker(), *(replica.start() for replica in replicas))
        await stack.ready(*replicas)
        client = Timed(int(stack.url.rpartition(":")[2]))
        await client.run(RATE, WARM_UP / RATE)
        client.first_s.clear()
        before = [await replica.served() for replica in replicas]
        await client.run(RATE, SECONDS)
        served = [await replica.served() - earlier for replica, earlier in zip(replicas, before, strict=True)]
    finally:
        await stack.close()
        for replica in replicas:
            await replica.stop()
    first_s = sorted(client.first_s)
    return first_s[int(0.99 * len(first_s))], served[-1] / sum(served)


async def test_its_share_falls_and_the_99th_percentile_stays(tmp_path: Path) -> None:
    even, slow = tmp_path / "even", tmp_path / "slow"
    even.mkdir()
    slow.mkdir()
    baseline_s, _ = await p99(even, 1.0)
    slowed_s, share = await p99(slow, 0.2)
    assert share < 0.5 / REPLICAS, (share, slowed_s, baseline_s)
    assert slowed_s <= 1.5 * baseline_s, (share, slowed_s, baseline_s)
