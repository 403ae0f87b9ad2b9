"""A replica whose connections are lost has died only if it takes no new ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.http.http1_client import ConnectionPool
from gateway.routing.fleet_listeners import FleetListeners
from gateway.routing.replica_handle import ReplicaHandle
from gateway.routing.tcp_liveness_check import TcpLivenessCheck
from tests.gateway.fake_replica import SECRET, FakeReplica, ready_replica
from tests.gateway.fake_replica import reset as reset_connection
from tests.gateway.worker import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio]


@pytest_asyncio.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    made = FakeReplica("r")
    await made.start()
    yield made
    await made.stop()


@pytest.mark.parametrize("multiplexed", [True, False])
async def test_a_reset_of_the_network_is_no_death(replica: FakeReplica, multiplexed: bool) -> None:
    died: list[str] = []
    events = FleetListeners(died=lambda model, _: died.append(model))
    handle = ReplicaHandle(ready_replica(url=replica.url), 1.0, SECRET, events=events)
    handle.subscribe(SECRET, lambda _: None, multiplexed=multiplexed)

    async def answers() -> bool:
        return handle.answering

    async def is_lost() -> bool:
        return not handle.answering

    async def is_dead() -> bool:
        return died == ["m"]

    await until(answers)
    for connection in list(replica.connections):
        reset_connection(connection.transport)
    await until(is_lost)
    await until(answers)
    # The check of the reset has ended: it would find the death below too, and report it a second time.
    assert await handle.liveness.is_alive()
    assert not died
    replica.report(state="ready")
    await replica.stop()
    await until(is_dead)
    handle.close()
    await replica.start()


async def test_a_check_is_for_all_that_ask_meanwhile(replica: FakeReplica) -> None:
    check = TcpLivenessCheck(ConnectionPool(replica.url, 1.0))
    assert await asyncio.gather(*[check.is_alive() for _ in range(50)]) == [True] * 50
    assert len(replica.connections) <= 2
    await replica.stop()
    assert await asyncio.gather(*[check.is_alive() for _ in range(50)]) == [False] * 50
    await replica.start()
