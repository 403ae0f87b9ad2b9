"""Queueing, retries and refusals: real workers, fake replicas."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.fake_replica import DONE, Exchange, FakeReplica, event, hold, stream
from tests.gateway.worker import Stack, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_deadline_in_the_queue_of_a_full_fleet_is_answered_with_deadline(shared: Stack) -> None:
    replica = await shared.serve("full", bound=1)
    await shared.warm_up()
    replica.hits.clear()
    release = asyncio.Event()
    replica.answer = hold(release)
    first = asyncio.create_task(shared.chat())
    await until(lambda: len(replica.hits) == 1)
    answer = await shared.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-timeout-s": "1"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline")
    release.set()
    assert (await first).status_code == 200
    assert len(replica.hits) == 1


@pytest.mark.parametrize("reason", ["busy", "draining", "starting"])
async def test_a_refused_request_is_retried_on_another_replica(shared: Stack, reason: str) -> None:
    refusing = await shared.replica(f"refuses-{reason}")
    refusals = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal refusals
        refusals += 1
        await exchange.refuse(reason)

    refusing.answer = answer
    await shared.ready(refusing)
    asked = asyncio.create_task(shared.chat())
    await until(lambda: refusals >= 3)  # each new report of the replica leads to another attempt
    other = await shared.replica(f"takes-{reason}")
    shared.controller.set(refusing, other)
    answer_ = await asked
    assert answer_.status_code == 200
    assert answer_.headers["x-tidegate-replica"] == other.id


async def test_no_replica_gets_more_than_its_bound(shared: Stack) -> None:
    replicas: list[FakeReplica] = [await shared.replica(f"bounded-{i}", bound=3) for i in range(2)]
    most = {replica.id: 0 for replica in replicas}
    release = asyncio.Event()

    def watch(replica: FakeReplica):  # type: ignore[no-untyped-def]
        async def answer(exchange: Exchange) -> None:
            most[replica.id] = max(most[replica.id], replica.in_flight)
            await release.wait()
            await stream(event("a") + event(finish="stop") + DONE)(exchange)

        return answer

    await shared.ready(*replicas)
    await shared.warm_up()
    for replica in replicas:
        replica.hits.clear()
        replica.answer = watch(replica)
    asked = [asyncio.create_task(shared.chat(stream=True)) for _ in range(20)]
    await shared.queued(14)
    release.set()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert all(count <= 3 for count in most.values())
    assert sum(len(replica.hits) for replica in replicas) == 20
