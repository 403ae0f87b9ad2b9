"""Schedules, spare replicas, rates and the scale-up delay in a running controller."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.serve.plane import SMALL, Plane
from tests.serve.sim_documents import document, sim_model
from tests.serve.traffic import Traffic, by_rate

ANY = {"max_step_up": 4, "max_step_down": 1, "hold_s": 1}


def written(folder: Path, **scale: Any) -> dict[str, Any]:
    made = sim_model()
    made["control"] |= {"tick_s": 1, "policy": by_rate(folder), "scale": ANY | scale}
    return document(made)


async def counts(traffic: Traffic, seconds: int, rate: float) -> list[int]:
    """The replica count after each second."""
    found = []
    for _ in range(seconds):
        await traffic.run(1, m=rate)
        found.append(traffic.plane.counts().get(SMALL, 0))
    return found


def longest_below(found: list[int], count: int) -> int:
    return next(at for at, each in enumerate([*found, count]) if each >= count)


@pytest.mark.slow
async def test_a_schedule_holds_by_the_wall_clock_and_when_it_is_applied(
    plane: Plane, tmp_path: Path
) -> None:
    # The clock starts at 1000 s: 00:16:40 in UTC, 01:16:40 in Berlin.
    floor = {"start": "17 1 * * *", "end": "18 1 * * *", "timezone": "Europe/Berlin", "min": 3}
    traffic = await Traffic.over(plane, written(tmp_path, schedules=[floor]), 10, m=1.0)
    found = await counts(traffic, 90, 1.0)
    assert found[0] == found[-1] == 1
    assert 58 <= found.count(3) <= 66
    now = {"start": "0 1 * * *", "end": "0 2 * * *", "timezone": "Europe/Berlin"}
    plane.controller.apply(written(tmp_path, schedules=[now | {"min": 4}]))
    assert longest_below(await counts(traffic, 4, 0.0), 4) <= 2
    plane.controller.apply(written(tmp_path, schedules=[now | {"max": 2}]))
    assert (await counts(traffic, 4, 4.0))[-1] == 2


async def test_spare_replicas_are_beyond_the_need(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, written(tmp_path, spare=1), 10, m=2.0)
    assert plane.counts() == {SMALL: 3}
    assert (await counts(traffic, 10, 4.0))[-1] == 4, "the mode has at most four"


@pytest.mark.slow
async def test_a_scale_up_waits_for_its_window_and_no_longer(plane: Plane, tmp_path: Path) -> None:
    traffic = await Traffic.over(plane, written(tmp_path, hold_up_s=20), 10, m=1.0)
    # The rate is a mean of six seconds.
    peak = await counts(traffic, 12, 4.0)
    assert {*peak, *await counts(traffic, 20, 1.0)} == {1}
    assert 20 <= longest_below(await counts(traffic, 40, 4.0), 4) <= 20 + 8


@pytest.mark.slow
async def test_rates_bound_each_direction(plane: Plane, tmp_path: Path) -> None:
    rates = {"rates_up": [{"replicas": 1, "period_s": 10}], "rates_down": [{"replicas": 1, "period_s": 20}]}
    traffic = await Traffic.over(plane, written(tmp_path, **rates), 10, m=1.0)
    for rate, period_s in ((4.0, 10), (1.0, 20)):
        found = await counts(traffic, 80, rate)
        assert found[-1] == rate
        changed = [at for at, (was, count) in enumerate(pairwise(found)) if was != count]
        assert all(later - at >= period_s - 1 for at, later in pairwise(changed))
