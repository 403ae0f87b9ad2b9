"""Plans are made in a thread, of what was known when they began."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from policy.adapter_placement.plan import PLAN_PERIOD_S, plan
from policy.adapter_placement.types import PlacementPlan
from policy.wire.adapter_catalog import Alias, CatalogVersion
from policy.wire.heartbeat import AdapterRef, AdapterUse, Heartbeat
from serve.adapters import placement_loop
from serve.adapters.adapter_demand import AdapterDemandTracker
from serve.adapters.placement_loop import AdapterPlacementPlans
from tests.serve.replicas import replica

DIGEST = "a" * 64
SQL = Alias(
    model="m",
    name="sql",
    revision=1,
    versions=(CatalogVersion(number=1, digest=DIGEST, rank=8, size=10, source="/a", at=0.0),),
    split=((1, 1.0),),
)


async def test_heartbeats_are_answered_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 32 replicas of 64 slots one took 20 s: the controller answered nothing and lost its lease."""
    began, may_end, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def slow(hosts: Iterable[Any], *known: Any) -> PlacementPlan:
        loop.call_soon_threadsafe(began.set)
        assert may_end.wait(60)
        return plan(hosts, *known)

    monkeypatch.setattr(placement_loop, "plan", slow)
    demand = AdapterDemandTracker()
    placing = AdapterPlacementPlans(demand, lambda replica: 4)
    used = AdapterUse(name="sql", digest=DIGEST, requests=10)
    demand.note(Heartbeat(replica=replica("r1"), uses=(used,)), 5.0)
    planning = asyncio.create_task(placing.plan("m", [replica("r1")], [SQL], 5.0))
    await began.wait()
    assert placing.orders("r1").hold is None
    assert placing.lacks(replica("r2"))
    placing.make_due("m")
    may_end.set()
    await planning
    assert placing.orders("r1").hold == (AdapterRef(name="sql", digest=DIGEST),)
    assert placing.due("m", 5.0), "a replica came meanwhile"
    await placing.plan("m", [replica("r1"), replica("r2")], [SQL], 5.0)
    assert not placing.lacks(replica("r2"))
    assert not placing.due("m", 5.0 + PLAN_PERIOD_S / 2)
