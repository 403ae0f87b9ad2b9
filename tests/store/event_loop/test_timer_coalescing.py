"""Sleeps that end together, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from store.event_loop.timer_coalescing import sleep_to_next
from tests.gateway.virtual_time import run_virtual


def test_sleeps_of_several_tasks_end_together() -> None:
    async def run() -> None:
        clock, woken = asyncio.get_running_loop().time, dict[float, list[int]]()

        async def look(number: int, period_s: float) -> None:
            for _ in range(round(2 / period_s)):
                await sleep_to_next(period_s)
                woken.setdefault(round(clock(), 6), []).append(number)

        begun = clock()
        await asyncio.gather(look(1, 0.1), _later(0.033, look(2, 0.2)), _later(0.087, look(3, 0.5)))
        moments = sorted(woken)
        assert moments[0] - begun <= 0.1
        # Some of the first end as the later ones sleep on.
        assert len(moments) <= 21
        assert all(1 in woken[at] for at in moments[:20])
        assert [sum(each.count(number) for each in woken.values()) for number in (1, 2, 3)] == [20, 10, 4]

    run_virtual(run)


async def _later(delay_s: float, work: Coroutine[Any, Any, None]) -> None:
    await asyncio.sleep(delay_s)
    await work


def test_a_sleep_at_a_multiple_lasts_a_whole_period() -> None:
    async def run() -> None:
        clock = asyncio.get_running_loop().time
        await sleep_to_next(0.5)
        began = clock()
        await sleep_to_next(0.5)
        assert round(clock() - began, 6) == 0.5

    run_virtual(run)
