"""Row 42: load reports of a replica are stale or wrong; the gateway uses its own exact counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.faults import faults
from tests.faults.faulty_upstream import FaultyUpstream
from tests.faults.harness import Harness
from tests.gateway.fake_replica import hold
from tests.gateway.worker import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
BOUND = 20
GATEWAY = {"queue_timeout_s": 15}


async def spread(harness: Harness, model: str, fleet: list[FaultyUpstream], streams: int) -> list[int]:
    placed = asyncio.Event()
    for one in fleet:
        one.usual = hold(placed, faults.paced(200, 0.05))
    clients = [await harness.post(model, stream=True) for _ in range(streams)]
    await until(lambda: sum(len(one.open) for one in fleet) == streams, "all are placed")
    found = [len(one.open) for one in fleet]
    placed.set()
    for client in clients:
        await client.events(1)
    for client in clients:
        client.leave()
    for one in fleet:
        one.usual = faults.reply()
    return found


@pytest.mark.parametrize(
    "lies",
    [
        {"in_flight": 0, "running": 0, "waiting": 0},
        {"in_flight": -5},
        {"at": 0.0, "in_flight": 0, "bound": BOUND},
    ],
    ids=["idle", "negative", "old"],
)
async def test_42_false_low_loads_get_no_more(harness: Harness, model: str, lies: dict[str, Any]) -> None:
    fleet = await harness.fleet(model, 2, bound=BOUND)
    fleet[0].lies = lies
    async with harness.expect(model, {"cancelled": BOUND}):
        found = await spread(harness, model, fleet, BOUND)
    assert min(found) >= BOUND * 0.4


async def test_42_a_replica_with_a_stale_full_report_gets_requests(harness: Harness, model: str) -> None:
    served = asyncio.Event()
    (one,) = await harness.fleet(model, 1, usual=hold(served), bound=2)
    async with harness.expect(model) as after:
        holders = [await harness.post(model) for _ in range(2)]
        await until(lambda: len(one.open) == 2)
        await harness.shows(one, in_flight=2)
        one.frozen = True
        served.set()
        for holder in holders:
            assert (await holder.end()).status == 200
        one.usual = faults.reply()
        replies = await asyncio.gather(*(harness.ask(model) for _ in range(10)))
        assert {reply.status for reply in replies} == {200}
        one.frozen = False
        one.report()
        assert set(await after.outcomes()) == {"ok"}


async def test_42_invalid_load_lines_are_ignored(harness: Harness, model: str) -> None:
    bad, good = await harness.fleet(model, 2)
    async with harness.expect(model, {"ok": 20}):
        bad.lies = {"in_flight": "many", "bound": None}
        bad.report()
        for _ in range(20):
            assert (await harness.ask(model)).status == 200
        bad.lies = {}
        bad.report()
        await until(lambda: harness.admissible(bad.id), "its load lines are valid again")
    assert good.log
