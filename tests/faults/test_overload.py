"""Overload and row 54: admitted requests keep their latency, the rest is refused, and tenants share.

The same is asserted in virtual time by ``tests/sim/simulator/test_overload.py``, in each run of `make test`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.faults.alerts import raises
from tests.faults.live import MODEL, Live
from tests.faults.load_generator import (
    REPLICAS,
    SLOTS,
    ClientRequest,
    load_generator,
    model_with_slo,
    quantile,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("idle_cores"),
]
TTFT_S = 0.5
# Multiples of the capacity, and the seconds of each: near the capacity, noise needs longer phases.
RATES = ((1, 60.0), (2, 20.0), (3, 20.0), (5, 40.0), (1, 40.0))


class Phase:
    """The outcomes of one rate, without its first second, in which queues fill."""

    def __init__(self, visits: list[ClientRequest], seconds: float) -> None:
        start = min(visit.asked_at for visit in visits)
        self.visits = visits
        self.served = [visit for visit in visits if visit.served]
        refused = [reply for visit in visits for reply in visit.attempts if reply.status != 200]
        counted = [v for v in self.served if start + 1.0 <= v.ended_at <= start + seconds]
        self.goodput = sum(visit.ttft_s <= TTFT_S for visit in counted) / (seconds - 1.0)
        at_once = [visit for visit in self.served if len(visit.attempts) == 1 and visit.ttft_s <= TTFT_S]
        self.kept = len(at_once) / len(visits)
        self.ttft_p95 = quantile([visit.ttft_s for visit in self.served], 0.95)
        self.codes = Counter(reply.error["code"] for reply in refused if reply.error)
        self.refused_p99 = quantile([reply.head_at - reply.asked_at for reply in refused] or [0.0], 0.99)
        self.late_p99 = quantile([visit.late_s for visit in visits], 0.99)

    def __repr__(self) -> str:
        return (
            f"{len(self.visits)} visits, {len(self.served)} served, goodput {self.goodput:.1f}/s, "
            f"ttft p95 {self.ttft_p95:.3f} s, refused {dict(self.codes)} in {self.refused_p99:.3f} s"
        )


async def test_admitted_requests_keep_the_slo_at_multiples_of_the_capacity(tmp_path: Path) -> None:
    async with model_with_slo(tmp_path, ttft_s=TTFT_S) as live:
        clients = load_generator(live)

        async def phase(rate: float, seconds: float) -> Phase:
            return Phase(await clients.open_loop(rate, seconds), seconds)

        async def counted(name: str, **labels: str) -> float:
            return await live.metric(f"tidegate_{name}_total", model=MODEL, **labels)

        capacity = 0.7 * await clients.closed_loop(REPLICAS * SLOTS, 10.0)
        while (await phase(1.05 * capacity, 20.0)).kept >= 0.95:
            capacity *= 1.05
        phases: list[Phase] = []
        memory: list[int] = []
        before = await live.scrape()
        for times, seconds in RATES:
            attempts, ok = await counted("replica_attempts"), await counted("requests", outcome="ok")
            phases.append(await phase(times * capacity, seconds))
            memory.append(psutil.Process(live.workers[0].pid).memory_info().rss)
            attempts = await counted("replica_attempts") - attempts
            assert attempts <= 1.2 * (await counted("requests", outcome="ok") - ok)
        raises(tmp_path, "TidegateRejects", before, await live.scrape(), model=MODEL)
        normal, worst, after = phases[0], phases[3], phases[4]
        assert worst.goodput >= 0.9 * min(normal.goodput, capacity), phases
        assert worst.ttft_p95 <= 1.5 * normal.ttft_p95, phases
        # The delays of this process are not the gateway's.
        assert worst.refused_p99 <= 0.1 + worst.late_p99, phases
        assert not any(each.codes["deadline"] for each in phases), phases
        # At the capacity, random arrivals exceed it for some seconds.
        assert len(after.served) >= 0.9 * len(after.visits), phases
        assert after.ttft_p95 <= max(TTFT_S, 1.5 * normal.ttft_p95), phases
        assert memory[-1] <= 1.3 * memory[0]


KEYS = {"heavy": "tg-heavy", "light": "tg-light"}


@pytest_asyncio.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    async with model_with_slo(tmp_path, ttft_s=1.0, keys=KEYS) as live:
        yield live


@pytest_asyncio.fixture
async def slow_live(tmp_path: Path) -> AsyncIterator[Live]:
    """So many slots that one falls free much sooner than a prompt is computed."""
    async with model_with_slo(tmp_path, ttft_s=2.0, keys=KEYS, slots=32, speed=0.25) as live:
        yield live


async def test_54_tenants_with_ten_to_one_demand_get_equal_service(live: Live) -> None:
    seconds = 60.0
    light, heavy = await asyncio.gather(
        load_generator(live, 1).open_loop(14, seconds, key=KEYS["light"], retries=0),
        load_generator(live, 3).open_loop(140, seconds, key=KEYS["heavy"], retries=0),
    )
    start = light[0].asked_at
    one, other = (
        sum(visit.served and start + 1.0 <= visit.ended_at <= start + seconds for visit in visits)
        for visits in (light, heavy)
    )
    assert (one + other) ** 2 / (2 * (one**2 + other**2)) >= 0.95  # Jain's index


async def test_54_a_tenant_over_its_share_barely_delays_another_tenant(slow_live: Live) -> None:
    """A light prompt of some 2,000 tokens takes the engine 0.25 s; one of 64 slots falls free every 15 ms."""
    seconds = 120.0

    def light() -> Awaitable[list[ClientRequest]]:
        return load_generator(slow_live, 2).open_loop(0.75, seconds, key=KEYS["light"], words=1200)

    alone = await light()
    beside, _ = await asyncio.gather(
        light(), load_generator(slow_live).open_loop(40, seconds, key=KEYS["heavy"], words=80, varied=True)
    )
    assert all(visit.served for visit in beside)
    for q in (0.5, 0.75, 0.95):
        before, now = (quantile([visit.ttft_s for visit in visits], q) for visits in (alone, beside))
        assert now <= 1.5 * before, (q, before, now)
