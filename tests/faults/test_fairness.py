"""Row 54: a tenant with ten times the demand gets its share and costs others no latency.

The same is asserted in virtual time by ``tests/sim/twin/test_overload.py``, in each run of `make test`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest
import pytest_asyncio

from policy.stats.quantiles import nearest_rank
from tests.faults.crowd import Crowd, Visit, jain
from tests.faults.site import Site, opened

pytestmark = [pytest.mark.process, pytest.mark.long]
KEYS = {"loud": "tg-loud", "quiet": "tg-quiet"}
# What its model promises: who would wait for more than half of it is told to come again.
TTFT_S = 1.0
# A prompt of some 850 tokens takes the engine about 50 ms. A step takes 16, and whoever comes to a busy
# engine waits for the end of one, which no gateway can change.
WORDS = {"quiet": 500, "loud": 80}


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with opened(tmp_path, ttft_s=TTFT_S, keys=KEYS) as site:
        yield site


async def equal_shares(crowd: Crowd, seconds: float) -> None:
    """Both want more than half, one ten times as much as the other: both get half."""
    quiet, loud = await asyncio.gather(
        crowd.open_loop(14, seconds, "quiet", key=KEYS["quiet"], retries=0),
        crowd.open_loop(140, seconds, "loud", key=KEYS["loud"], retries=0),
    )
    start = quiet[0].asked_at
    shares = [_served(visits, start + 1.0, start + seconds) for visits in (quiet, loud)]
    assert jain(shares) >= 0.95


async def unharmed(site: Site, seconds: float) -> None:
    """One wants a sixth of its share, the other more than ten times that and than there is.

    The one comes at the same instants alone and beside the other: of some fifty visits the 95th
    percentile is made by the two or three that come close together.
    """

    def quiet() -> Awaitable[list[Visit]]:
        crowd = site.another_crowd(2)
        return crowd.open_loop(1.5, seconds, "quiet", key=KEYS["quiet"], words=WORDS["quiet"])

    alone = _ttft(await quiet())
    victim, _ = await asyncio.gather(
        quiet(), site.crowd.open_loop(24, seconds, "loud", key=KEYS["loud"], words=WORDS["loud"])
    )
    beside = _ttft(victim)
    assert all(visit.served for visit in victim)
    for q in (0.5, 0.75, 0.95):
        assert nearest_rank(beside, q) <= 1.5 * nearest_rank(alone, q), (q, sorted(alone), sorted(beside))


def _served(visits: list[Visit], after: float, until: float) -> int:
    return sum(visit.served is not None and after <= visit.ended_at <= until for visit in visits)


def _ttft(visits: list[Visit]) -> list[float]:
    return [visit.ttft_s for visit in visits if visit.served]


async def test_fairness_for_longer(site: Site) -> None:
    await equal_shares(site.crowd, 60.0)
    await unharmed(site, 120.0)
