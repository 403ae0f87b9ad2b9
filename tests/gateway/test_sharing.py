"""A loud tenant beside a quiet one in virtual time: what each gets, and what it costs the other."""

from __future__ import annotations

import asyncio

import pytest

from policy.stats.quantiles import nearest_rank
from tests.faults.crowd import jain
from tests.gateway.virtual import Town, Visit, play

pytestmark = pytest.mark.process
# Two replicas of four slots, 24 tokens in 0.4 s: about 20 are served a second.
SECONDS = 60.0


def town(seed: int, ttft_s: float | None) -> Town:
    return Town(replicas=2, bound=4, patience_s=15.0, ttft_s=ttft_s, seed=seed)


@pytest.mark.parametrize("seed", range(2))
def test_ten_to_one_of_demand_is_one_to_one_of_service(seed: int) -> None:
    async def scene() -> list[list[Visit]]:
        site = town(seed, 1.0)
        both = await asyncio.gather(
            site.open_loop(14.0, SECONDS, "quiet"), site.open_loop(140.0, SECONDS, "loud")
        )
        site.close()
        return both

    assert jain([sum(visit.ttft_s is not None for visit in visits) for visits in play(scene)]) >= 0.99


@pytest.mark.parametrize("ttft_s", [None, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_loud_tenant_costs_a_quiet_one_little(seed: int, ttft_s: float | None) -> None:
    async def scene() -> list[list[Visit]]:
        site = town(seed, ttft_s)
        alone = await site.open_loop(1.5, 2 * SECONDS, "quiet", prompt=850)
        beside, _ = await asyncio.gather(
            site.open_loop(1.5, 2 * SECONDS, "quiet", prompt=850),
            site.open_loop(24.0, 2 * SECONDS, "loud", prompt=150),
        )
        site.close()
        return [alone, beside]

    alone, beside = ([visit.ttft_s for visit in visits if visit.ttft_s is not None] for visits in play(scene))
    assert nearest_rank(beside, 0.95) <= 1.35 * nearest_rank(alone, 0.95)
