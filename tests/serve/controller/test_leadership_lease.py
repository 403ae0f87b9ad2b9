"""Contending for the lease: who leads, what a stand-by answers, and how a leader ends."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from policy.errors import NotLeader, Unreachable
from policy.leader_election import LeaderLease
from policy.wire.headers import SECRET_HEADER
from serve.controller.leadership_lease import Leadership
from serve.controller.standby_controller import ElectedControllerApp
from tests.gateway.worker import until


class Store:
    """A lease in memory that may be away."""

    def __init__(self) -> None:
        self.lease: LeaderLease | None = None
        self.away = False

    def read(self) -> LeaderLease | None:
        if self.away:
            raise Unreachable("the store is away")
        return self.lease

    def replace(self, seen: LeaderLease | None, new: LeaderLease) -> bool:
        if self.read() != seen:
            return False
        self.lease = new
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def candidate(store: Store, address: str, clock: Clock) -> Leadership:
    return Leadership(store, address, 0.05, wall=clock, monotonic=clock)


async def test_a_leader_that_cannot_renew_is_deposed_and_another_one_leads() -> None:
    store, clock = Store(), Clock()
    one, two = (candidate(store, address, clock) for address in ("a:1", "b:1"))
    running = [asyncio.create_task(each.run()) for each in (one, two)]
    await one.won.wait()
    await until(lambda: two.status().leader == "a:1", "the other one stands by")
    assert one.leads() and not two.won.is_set()
    assert (await asked(two, "/fleet")) == (
        503,
        "the controller at b:1 stands by; that at a:1 leads in term 1",
    )
    store.away = True
    await until(lambda: bool(one.status().trouble and two.status().trouble), "both notice")
    clock.now = 0.04
    with pytest.raises(NotLeader, match="term 1 was lost: the store is away"):
        await running[0]
    await one.release()  # as its process does at its end: a turn of its thread may be under way
    store.away, clock.now = False, 0.2
    await two.won.wait()
    assert (two.status().leads, two.status().term, two.status().trouble) == (True, 2, "")
    running[1].cancel()
    await two.release()
    assert store.lease is not None and store.lease.released and not two.leads()
    assert (await asked(two, "/fleet"))[1] == "the controller at b:1 stands by; none leads now"


async def asked(leadership: Leadership, path: str) -> tuple[int, str]:
    transport = httpx.ASGITransport(ElectedControllerApp(leadership, asyncio.Event(), "s"))
    async with httpx.AsyncClient(transport=transport, base_url="http://c") as client:
        assert (await client.get("/livez")).json() == {"ok": True}
        # A stand-by is ready once it knows who leads.
        ready = (await client.get("/readyz")).status_code == 200
        assert ready == bool(leadership.status().leader)
        assert (await client.get(path)).status_code == 401
        answer = await client.get(path, headers={SECRET_HEADER: "s"})
        return answer.status_code, answer.json()["error"]["message"]
