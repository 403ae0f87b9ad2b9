"""Overload in virtual time: how deep a queue gets, and who is let in, where no machine is in the way."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from policy.errors import Refusal
from policy.stats.quantiles import nearest_rank
from tests.gateway.virtual import Town, Visit, play

pytestmark = pytest.mark.process
# Two replicas of four slots, 24 tokens in 0.4 s: about 20 are served a second.
CAPACITY = 18.0
TTFT_S = 0.5


def ttft_p95(visits: list[Visit]) -> float:
    return nearest_rank([visit.ttft_s for visit in visits if visit.ttft_s is not None], 0.95)


def refusals(visits: list[Visit]) -> Counter[Refusal]:
    return Counter(reason for visit in visits for reason, _ in visit.refusals)


def goodput(visits: list[Visit], seconds: float) -> float:
    end = visits[0].asked_at + seconds
    kept = [v for v in visits if v.ttft_s is not None and v.ttft_s <= TTFT_S and v.ended_at <= end]
    return len(kept) / seconds


@pytest.mark.parametrize("seed", range(3))
def test_what_is_admitted_waits_no_longer_than_at_capacity(seed: int) -> None:
    async def scene() -> list[list[Visit]]:
        town = Town(replicas=2, bound=4, patience_s=60.0, ttft_s=TTFT_S, seed=seed)
        phases = [await town.open_loop(times * CAPACITY, 30.0, retries=2) for times in (1, 5, 1)]
        town.close()
        return phases

    normal, worst, after = play(scene)
    assert ttft_p95(worst) <= 1.1 * ttft_p95(normal)
    assert goodput(worst, 30.0) >= goodput(normal, 30.0)
    assert set(refusals(worst)) == {Refusal.OVERLOADED}
    assert all(retry_s for visit in worst for _, retry_s in visit.refusals)
    assert sum(visit.ttft_s is not None for visit in after) >= 0.97 * len(after)


@pytest.mark.parametrize("output", [24, 100])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_let_in_to_wait_in_vain_from_the_first_rush_on(seed: int, output: int) -> None:
    """Nobody has ended yet: only the engine model says how long a slot is held."""

    async def scene() -> list[Visit]:
        town = Town(replicas=2, bound=8, patience_s=0.8, seed=seed)
        await asyncio.sleep(0.1)  # its replicas have said how fast they are
        visits = await town.open_loop(5 * CAPACITY, 10.0, output=output)
        town.close()
        return visits

    visits = play(scene)
    assert set(refusals(visits)) == {Refusal.OVERLOADED}
    assert goodput(visits, 10.0) > 0
