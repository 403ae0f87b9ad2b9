"""Row 54: a tenant with ten times the demand gets its share and costs others little latency.

The same is asserted in virtual time by ``tests/sim/twin/test_overload.py``, in each run of `make test`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.crowd import Visit, crowd, opened, quantile
from tests.faults.live import Live

pytestmark = [pytest.mark.process, pytest.mark.long]
KEYS = {"loud": "tg-loud", "quiet": "tg-quiet"}
# A prompt of some 850 tokens takes the engine about 50 ms; a step takes 16 ms.
WORDS = {"quiet": 500, "loud": 80}


@pytest_asyncio.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    async with opened(tmp_path, ttft_s=1.0, keys=KEYS) as live:
        yield live


async def test_54_ten_to_one_of_demand_is_one_to_one_of_service(live: Live) -> None:
    seconds = 60.0
    quiet, loud = await asyncio.gather(
        crowd(live, 1).open_loop(14, seconds, key=KEYS["quiet"], retries=0),
        crowd(live, 3).open_loop(140, seconds, key=KEYS["loud"], retries=0),
    )
    start = quiet[0].asked_at
    one, other = (
        sum(visit.served and start + 1.0 <= visit.ended_at <= start + seconds for visit in visits)
        for visits in (quiet, loud)
    )
    assert (one + other) ** 2 / (2 * (one**2 + other**2)) >= 0.95  # Jain's index


async def test_54_a_loud_tenant_costs_a_quiet_one_little_latency(live: Live) -> None:
    seconds = 120.0

    def quiet() -> Awaitable[list[Visit]]:
        return crowd(live, 2).open_loop(1.5, seconds, key=KEYS["quiet"], words=WORDS["quiet"])

    alone = await quiet()
    beside, _ = await asyncio.gather(
        quiet(), crowd(live).open_loop(24, seconds, key=KEYS["loud"], words=WORDS["loud"])
    )
    assert all(visit.served for visit in beside)
    for q in (0.5, 0.75, 0.95):
        before, now = (quantile([visit.ttft_s for visit in visits], q) for visits in (alone, beside))
        assert now <= 1.5 * before, (q, before, now)
