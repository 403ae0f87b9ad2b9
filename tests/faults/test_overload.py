"""Overload: admitted requests keep their latency, the rest is refused at once.

The same is asserted in virtual time by ``tests/sim/twin/test_overload.py``, in each run of `make test`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from policy.stats.quantiles import nearest_rank
from tests.faults.crowd import Crowd, Visit
from tests.faults.site import REPLICAS, SLOTS, Site, opened

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(900)]
TTFT_S = 0.5
# Each rate and for how many of the short test's seconds: where little is refused chance needs longer.
RATES = ((1, 12.0), (2, 4.0), (3, 4.0), (5, 8.0), (1, 8.0))


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with opened(tmp_path, ttft_s=TTFT_S) as site:
        yield site


class Phase:
    """What became of the visits of one rate, but for its first second, in which queues fill.

    Goodput are those that were served while it lasted: what was retried until it was over says nothing.
    """

    def __init__(self, visits: list[Visit], seconds: float) -> None:
        start = min(visit.asked_at for visit in visits)
        self.visits = visits
        self.attempts = [attempt for visit in visits for attempt in visit.attempts]
        self.served = [visit for visit in visits if visit.served]
        self.refused = [attempt for attempt in self.attempts if attempt.status != 200]
        counted = [v for v in self.served if start + 1.0 <= v.ended_at <= start + seconds]
        self.goodput = sum(visit.ttft_s <= TTFT_S for visit in counted) / (seconds - 1.0)
        at_once = [visit for visit in self.served if len(visit.attempts) == 1 and visit.ttft_s <= TTFT_S]
        self.kept = len(at_once) / len(visits)
        self.ttft_p95 = nearest_rank([visit.ttft_s for visit in self.served], 0.95)
        self.codes = Counter(attempt.code for attempt in self.refused)
        self.refused_p99 = nearest_rank([attempt.head_s for attempt in self.refused] or [0.0], 0.99)
        self.late_p99 = nearest_rank([visit.late_s for visit in visits], 0.99)

    def __repr__(self) -> str:
        return (
            f"{len(self.visits)} visits, {len(self.served)} served, goodput {self.goodput:.1f}/s, "
            f"ttft p95 {self.ttft_p95:.3f} s, refused {dict(self.codes)} in {self.refused_p99:.3f} s"
        )


async def phase(crowd: Crowd, rate: float, seconds: float) -> Phase:
    return Phase(await crowd.open_loop(rate, seconds), seconds)


async def overload(site: Site, capacity: float, scale: float) -> None:
    """Offers multiples of the capacity one after the other, and holds what FAULTS.md says of overload."""
    phases: list[Phase] = []
    memory: list[int] = []
    for times, seconds in RATES:
        attempts = await site.metric("tidegate_upstream_attempts_total", model="alpha")
        served = await site.metric("tidegate_requests_total", model="alpha", outcome="ok")
        phases.append(await phase(site.crowd, times * capacity, scale * seconds))
        memory.append(site.memory)
        attempts = await site.metric("tidegate_upstream_attempts_total", model="alpha") - attempts
        served = await site.metric("tidegate_requests_total", model="alpha", outcome="ok") - served
        assert attempts <= 1.2 * served
    normal, worst, after = phases[0], phases[3], phases[4]
    assert worst.goodput >= 0.9 * min(normal.goodput, capacity), phases
    assert worst.ttft_p95 <= 1.5 * normal.ttft_p95, phases
    assert all(attempt.retry_after_s for each in phases for attempt in each.refused)
    # What this process itself is late is not the gateway's.
    assert worst.refused_p99 <= 0.1 + worst.late_p99, phases
    assert not any(each.codes["deadline"] for each in phases), phases
    # At the very capacity chance alone offers more than that for some seconds.
    assert len(after.served) >= 0.9 * len(after.visits), phases
    assert after.ttft_p95 <= max(TTFT_S, 1.5 * normal.ttft_p95), phases
    assert memory[-1] <= 1.3 * memory[0]


async def test_overload_beyond_the_highest_rate_within_the_slo(site: Site) -> None:
    capacity = 0.7 * await site.crowd.closed_loop(REPLICAS * SLOTS, 10.0)
    while (await phase(site.crowd, 1.05 * capacity, 20.0)).kept >= 0.95:
        capacity *= 1.05
    await overload(site, capacity, 5.0)
