"""Who waits, who is sent elsewhere, and who is sent away: real workers, fake replicas."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.fake_replica import ANSWER, DONE, Exchange, FakeReplica, answer_json, event, hold, stream
from tests.gateway.worker import RawClient, Stack, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}


async def waiting(shared: Stack, count: int) -> None:
    async def so_many() -> bool:
        return await shared.metric("tidegate_queue_depth", model="alpha") == count

    await until(so_many, f"{count} wait")


async def test_a_request_waits_for_the_fleet(shared: Stack) -> None:
    await shared.ready()
    asked = asyncio.create_task(shared.chat())
    await waiting(shared, 1)
    replica = await shared.replica("late")
    shared.controller.set(replica)
    assert (await asked).content == ANSWER
    await waiting(shared, 0)


async def test_its_own_deadline_ends_the_wait_with_503(shared: Stack) -> None:
    await shared.ready()
    answer = await shared.http.post(
        "/v1/chat/completions", json=CHAT, headers={"x-request-timeout-s": "0.05"}
    )
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_replica"
    assert 1 <= int(answer.headers["retry-after"]) <= 120


async def test_a_full_fleet_is_told_apart_from_none(shared: Stack) -> None:
    replica = await shared.replica("full", bound=1)
    await shared.ready(replica)
    release = asyncio.Event()
    replica.answer = hold(release)
    first = asyncio.create_task(shared.chat())
    await until(lambda: len(replica.hits) == 1)
    answer = await shared.http.post(
        "/v1/chat/completions", json=CHAT, headers={"x-request-timeout-s": "0.05"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline")
    release.set()
    assert (await first).status_code == 200
    assert len(replica.hits) == 1


async def test_the_queue_is_served_in_order(shared: Stack) -> None:
    replica = await shared.replica("ordered", bound=1)
    await shared.ready()
    asked = []
    for i in range(5):
        asked.append(asyncio.create_task(shared.chat(user=str(i))))
        await waiting(shared, i + 1)
    shared.controller.set(replica)
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 5
    assert [hit.json["user"] for hit in replica.hits] == ["0", "1", "2", "3", "4"]


async def test_leaving_the_queue_costs_no_replica_anything(shared: Stack) -> None:
    await shared.ready()
    client = await RawClient.post(shared.url, "/v1/chat/completions", CHAT)
    await waiting(shared, 1)
    await client.leave()
    await waiting(shared, 0)
    replica = await shared.replica("after-leaving")
    await shared.ready(replica)
    assert (await shared.chat()).status_code == 200
    assert len(replica.hits) == 1


@pytest.mark.parametrize("reason", ["busy", "draining", "starting"])
async def test_a_refusal_is_taken_elsewhere_uncharged(shared: Stack, reason: str) -> None:
    refusing = await shared.replica(f"refuses-{reason}")
    refusals = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal refusals
        refusals += 1
        await exchange.refuse(reason)

    refusing.answer = answer
    await shared.ready(refusing)
    asked = asyncio.create_task(shared.chat())
    await until(lambda: refusals >= 3)  # each new word of the replica is believed, and tried
    other = await shared.replica(f"takes-{reason}")
    shared.controller.set(refusing, other)
    answer_ = await asked
    assert answer_.status_code == 200
    assert answer_.headers["x-tidegate-replica"] == other.id


async def test_whoever_was_refused_stands_before_those_who_came_later(shared: Stack) -> None:
    replica = await shared.replica("old-place", bound=8)
    await shared.ready(replica)

    async def refuse(exchange: Exchange) -> None:
        replica.say(in_flight=replica.bound + 1)  # what stays when this exchange has ended
        await exchange.refuse("busy")

    replica.answer = refuse
    asked = [asyncio.create_task(shared.chat(user="first"))]
    await until(lambda: len(replica.hits) == 1)
    await waiting(shared, 1)
    asked.append(asyncio.create_task(shared.chat(user="second")))
    await waiting(shared, 2)
    replica.hits.clear()
    replica.answer = answer_json
    replica.say(in_flight=replica.bound - 1)
    await asyncio.gather(*asked)
    assert [hit.json["user"] for hit in replica.hits] == ["first", "second"]
    replica.say(in_flight=0)


async def test_load_goes_to_the_least_loaded(shared: Stack) -> None:
    busy, idle = await shared.replica("busy-one"), await shared.replica("idle-one")
    busy.say(in_flight=5)
    await shared.ready(busy, idle)

    async def counted() -> bool:
        described = (await shared.admin.get("/admin/fleet")).json()["replicas"]
        return {r["id"]: r["in_flight"] for r in described} == {"busy-one": 5, "idle-one": 0}

    await until(counted)
    for _ in range(4):
        assert (await shared.chat()).headers["x-tidegate-replica"] == "idle-one"


async def test_a_dead_replica_costs_nothing_before_the_first_byte(shared: Stack) -> None:
    dies, lives = await shared.replica("dies"), await shared.replica("lives")
    lives.say(in_flight=7)
    await shared.ready(dies, lives)

    async def die(exchange: Exchange) -> None:
        exchange.reset()

    dies.answer = die
    answer = await shared.chat()
    assert answer.status_code == 200
    assert answer.headers["x-tidegate-replica"] == "lives"
    assert len(dies.hits) == 1


async def test_a_killed_replica_is_out_at_once_and_back_by_itself(shared: Stack) -> None:
    replica = await shared.replica("killed")
    await shared.ready(replica)
    await replica.stop()

    async def out() -> bool:
        return not (await shared.admin.get("/admin/fleet")).json()["replicas"][0]["admissible"]

    await until(out)
    asked = asyncio.create_task(shared.chat())
    await waiting(shared, 1)
    await replica.start()
    assert (await asked).status_code == 200


async def test_a_replica_that_talks_nonsense_is_out_until_it_talks_sense(shared: Stack) -> None:
    replica = await shared.replica("babbles")
    await shared.ready(replica)
    connected = set(replica.connections)
    replica.say(state="\udcff")
    await until(lambda: shared._admits(set()))
    replica.say(state="ready")
    await until(lambda: shared._admits({replica.id}))
    assert connected <= replica.connections


@pytest.mark.parametrize("death", ["a reset", "the guard's word"])
async def test_a_poison_request_touches_two_replicas_at_most(shared: Stack, death: str) -> None:
    async def die(exchange: Exchange) -> None:
        if death == "a reset":
            exchange.reset()
        else:
            await exchange.refuse("replica_lost")

    replicas = [await shared.replica(f"poisoned-{death[0]}-{i}") for i in range(4)]
    for replica in replicas:
        replica.answer = die
    await shared.ready(*replicas)
    answer = await shared.chat()
    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "replica_lost"
    assert sum(len(replica.hits) for replica in replicas) == 2


async def test_a_server_error_is_retried_once_elsewhere(shared: Stack) -> None:
    async def fail(exchange: Exchange) -> None:
        await exchange.reply(b'{"error": {"message": "Traceback"}}', status=500)

    fails, works = await shared.replica("fails"), await shared.replica("works")
    fails.answer = fail
    works.say(in_flight=7)
    await shared.ready(fails, works)
    assert (await shared.chat()).headers["x-tidegate-replica"] == "works"
    assert len(fails.hits) == 1

    works.answer = fail
    answer = await shared.chat()
    assert answer.status_code == 502
    assert "Traceback" not in answer.text
    assert len(fails.hits) + len(works.hits) == 4

    await shared.ready(fails)
    assert (await shared.chat()).status_code == 502
    assert len(fails.hits) == 3


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_client_error_is_passed_on_and_never_retried(shared: Stack, status: int) -> None:
    async def reject(exchange: Exchange) -> None:
        error = b'"message":"bad temperature","type":"BadRequestError","param":"temperature","code":400'
        await exchange.reply(b'{"error":{' + error + b"}}", status=status)

    replicas = [await shared.replica(f"rejects-{status}-{i}") for i in range(2)]
    for replica in replicas:
        replica.answer = reject
    await shared.ready(*replicas)
    answer = await shared.chat()
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"] == "bad temperature"
    assert error["param"] == "temperature"
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None or isinstance(error["code"], str)
    assert sum(len(replica.hits) for replica in replicas) == 1


async def test_a_connection_that_died_idle_is_replaced_unseen(shared: Stack) -> None:
    replica = await shared.replica("closes-idle")
    await shared.ready(replica)
    assert (await shared.chat()).status_code == 200

    async def close_without_answer(exchange: Exchange) -> None:
        replica.answer = answer_json
        exchange.close()

    replica.answer = close_without_answer
    assert (await shared.chat()).content == ANSWER
    assert len(replica.hits) == 3


async def test_nonsense_from_a_replica_is_502(shared: Stack) -> None:
    replica = await shared.replica("nonsense")
    await shared.ready(replica)

    async def zipped(exchange: Exchange) -> None:
        await exchange.reply(b"\x1f\x8b", content_encoding="gzip")

    async def page(exchange: Exchange) -> None:
        await exchange.reply(b"<html>", content_type="text/html")

    async def nothing(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    for answer in (zipped, page, nothing):
        replica.answer = answer
        assert (await shared.chat()).status_code == 502


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

    for replica in replicas:
        replica.answer = watch(replica)
    await shared.ready(*replicas)
    asked = [asyncio.create_task(shared.chat(stream=True)) for _ in range(20)]
    await waiting(shared, 14)
    release.set()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert all(count <= 3 for count in most.values())
    assert sum(len(replica.hits) for replica in replicas) == 20
