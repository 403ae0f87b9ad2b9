"""Rows 1 to 5, 28 to 30, 33 and 34: what is retried, where, how often, and what the client gets."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from policy.wire.adapter_catalog import served_name
from tests.faults import faults
from tests.faults.faulty_upstream import FaultyUpstream
from tests.faults.harness import Harness
from tests.gateway.fake_replica import Exchange, alias
from tests.gateway.worker import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
CONNECT_S, SILENT_S = 0.5, 3.0
AT_LEAST, BUDGET = 3, 0.2
GATEWAY = {
    "connect_timeout_s": CONNECT_S,
    "first_token_timeout_s": SILENT_S,
    "answer_timeout_s": SILENT_S,
    "queue_timeout_s": 60,
    "retry": {"budget": BUDGET, "at_least": AT_LEAST, "window_s": 10},
    "eject": {"base_s": 1.0},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_1_a_refused_connection_is_retried(harness: Harness, model: str, stream: bool) -> None:
    bad, good = await harness.fleet(model, 2, frames=False)
    await harness.prefer(bad)
    bad.refuse_connections()
    async with harness.expect(model, {"ok": 1}) as after:
        reply = await harness.ask(model, stream=stream)
        assert await after.attempts() == 2
    assert reply.status == 200
    assert reply.headers["x-tidegate-replica"] == good.id


@pytest.mark.parametrize(("code", "stream"), [(500, False), (500, True), (503, False)])
async def test_2_3_early_errors_are_retried(harness: Harness, model: str, code: int, stream: bool) -> None:
    bad, good = await harness.fleet(model, 2)
    bad.usual = faults.status(code, retry_after="3600") if code == 503 else faults.status(code)
    await harness.prefer(bad)
    async with harness.expect(model, {"ok": 1}, attempts=2):
        reply = await harness.ask(model, stream=stream)
    assert reply.headers["x-tidegate-replica"] == good.id


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_2_an_error_of_all_replicas_comes_once_from_each(
    harness: Harness, model: str, path: str
) -> None:
    fleet = await harness.fleet(model, 4, usual=faults.status(500, "no /secret/path of ours"))
    async with harness.expect(model, {"upstream_failed": 1}, attempts=4):
        reply = await harness.ask(model, path=path)
    assert reply.status == 502
    assert reply.error is not None
    assert "secret" not in reply.error["message"]
    assert [len(one.log) for one in fleet] == [1, 1, 1, 1]


async def test_3_a_503_of_all_replicas_has_retry_after(harness: Harness, model: str) -> None:
    await harness.fleet(model, 2, usual=faults.status(503, retry_after="3600"))
    async with harness.expect(model, {"no_replica": 1}, attempts=2):
        reply = await harness.ask(model)
    assert reply.status == 503
    assert reply.headers["retry-after"] == "120"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(("code", "attempts"), [(400, 1), (404, 2), (422, 1)])
async def test_4_a_rejection_is_passed_on(
    harness: Harness, model: str, code: int, attempts: int, path: str
) -> None:
    """A 404 contradicts the fleet: it is the answer if no replica knows better, and ejects none."""
    fleet = await harness.fleet(model, 2, usual=faults.status(code, "temperature must be at most 2"))
    async with harness.expect(model, {"bad_request": 1}, attempts=attempts):
        reply = await harness.ask(model, path=path)
    assert reply.status == code
    assert reply.error is not None
    assert reply.error["message"] == "temperature must be at most 2"
    assert sum(len(one.log) for one in fleet) == attempts


@pytest.mark.parametrize("code", [408, 409, 425, 429])
async def test_4_a_rate_limit_of_all_replicas_is_passed_on(harness: Harness, model: str, code: int) -> None:
    await harness.fleet(model, 2, usual=faults.status(code, "slow down", retry_after="7"))
    async with harness.expect(model, {"bad_request": 1}, attempts=2):
        reply = await harness.ask(model)
    assert (reply.status, reply.headers["retry-after"]) == (code, "7")


async def test_5_a_failing_adapter_does_not_eject_its_replica(harness: Harness, model: str) -> None:
    """Only requests for the adapter fail: requests for the base model are served throughout."""
    served = served_name("sql", "d" * 64)
    message = f"Loading lora {served} failed: LoRA rank 64 is greater than max_lora_rank 16."
    await harness.fleet(model, 2, faults={served: faults.status(500, message)})
    await harness.publish(alias("sql", "d" * 64, model=model))
    async with harness.expect(model) as after:
        for _ in range(100):
            reply = await harness.ask("sql")
            assert 400 <= reply.status < 500
        for _ in range(4):
            assert (await harness.ask(model)).status == 200
        assert not await harness.ejections(model)
        assert (await after.outcomes())["ok"] == 4
        assert await after.attempts() == 104


async def test_28_failures_of_a_replica_are_retried_within_the_budget(harness: Harness, model: str) -> None:
    fleet = await harness.fleet(model, 4, usual=faults.paced(1, 0.005))
    bad, count = fleet[0], itertools.count()
    healthy, broken = faults.paced(1, 0.005), faults.status(500)

    async def answer(exchange: Exchange) -> None:
        await (broken if next(count) % 3 == 2 else healthy)(exchange)

    bad.usual = answer
    requests = 1000
    async with harness.expect(model) as after:
        left = itertools.repeat(None, requests)

        async def ask() -> int:
            return sum([(await harness.ask(model)).status == 200 for _ in left])

        served = sum(await asyncio.gather(*(ask() for _ in range(8))))
        assert (await after.outcomes()).total() == requests
        retries = await after.attempts() - requests
    assert served >= 0.999 * requests
    assert retries <= BUDGET * requests


@pytest.mark.parametrize("how", ["answers", "connections"])
async def test_29_attempts_on_failing_replicas_are_bounded(harness: Harness, model: str, how: str) -> None:
    fleet = await harness.fleet(model, 4, usual=faults.status(500))
    if how == "connections":
        for one in fleet:
            one.refuse_connections()
    requests = 200
    async with harness.expect(model) as after:
        replies = [await harness.ask(model) for _ in range(requests)]
        assert await after.attempts() <= (1 + BUDGET) * requests + AT_LEAST
        assert (await after.outcomes())["ok"] == 0
    assert {reply.status for reply in replies} <= {502, 503}
    assert {reply.status for reply in replies[requests // 2 :]} == {503}
    # Attempts continue, so that recovery is found.
    for one in fleet:
        if how == "connections":
            await one.stop()
            await one.start()
        one.usual = faults.reply()
    await harness.serves(model, fleet[0].id)


async def test_30_a_request_that_kills_its_replica_is_retried_once(harness: Harness, model: str) -> None:
    fleet = await harness.fleet(model, 4)
    restarts: list[asyncio.Task[None]] = []

    def crash(one: FaultyUpstream) -> Any:
        async def restart() -> None:
            await asyncio.sleep(0.3)
            await one.start()

        async def answer(exchange: Exchange) -> None:
            await asyncio.sleep(0.01)
            one.die()
            restarts.append(asyncio.create_task(restart()))

        return answer

    for one in fleet:
        one.faults["poison"] = crash(one)
    async with harness.expect(model, {"replica_lost": 1, "ok": 4}):
        reply = await harness.ask(model, "poison", stream=True)
        await asyncio.gather(*restarts)
        for _ in range(4):
            assert (await harness.ask(model)).status == 200
    assert reply.status == 500
    assert reply.headers["x-should-retry"] == "false"
    assert sum(hit.text == "poison" for one in fleet for hit in one.log) == 2
    # Sent again it kills no other, although the others have restarted; what ran beside it is served.
    async with harness.expect(model, {"replica_lost": 2, "ok": 1}, attempts=1):
        for seed in (1, 2):
            again = await harness.ask(model, "poison", stream=False, seed=seed)
            assert (again.status, again.headers["x-should-retry"]) == (500, "false")
        assert (await harness.ask(model)).status == 200


async def test_30_a_request_whose_client_leaves_before_the_death_is_found_too(
    harness: Harness, model: str
) -> None:
    """Nothing was held against it: it killed a replica each time that it was sent again."""
    fleet = await harness.fleet(model, 3)

    def crash(one: FaultyUpstream) -> Any:
        async def answer(exchange: Exchange) -> None:
            await exchange.gone.wait()
            one.refuse_connections()
            asyncio.get_running_loop().call_later(0.2, one.die)

        return answer

    for one in fleet:
        one.faults["poison"] = crash(one)
    async with harness.expect(model, {"cancelled": 2, "replica_lost": 1, "ok": 1}):
        for _ in range(2):
            client = await harness.post(model, "poison", stream=True)
            await until(lambda: any(one.open for one in fleet))
            (killed,) = [one for one in fleet if one.open]
            client.leave()
            await harness.shows(killed, admissible=False)
        reply = await harness.ask(model, "poison", stream=True)
        assert (await harness.ask(model)).status == 200
    assert (reply.status, reply.headers["x-should-retry"]) == (500, "false")


@pytest.mark.long
async def test_30_a_request_on_which_replicas_hang_is_found_too(harness: Harness, model: str) -> None:
    fleet = await harness.fleet(model, 3)

    def hang(one: FaultyUpstream) -> Any:
        async def answer(exchange: Exchange) -> None:
            one.frozen = True  # it reports no more
            await exchange.gone.wait()

        return answer

    for one in fleet:
        one.faults["poison"] = hang(one)
    async with harness.expect(model, {"upstream_silent": 1, "replica_lost": 1, "ok": 1}):
        assert (await harness.ask(model, "poison")).status == 504
        hung = [one for one in fleet if one.frozen]
        assert len(hung) == 2
        for one in hung:
            await harness.shows(one, admissible=False)
            one.die()
            await asyncio.sleep(6.0)  # one after the other: it was no node that ended
        reply = await harness.ask(model, "poison")
        assert (await harness.ask(model)).status == 200
    assert (reply.status, reply.headers["x-should-retry"]) == (500, "false")


async def behind_a_proxy(
    harness: Harness, model: str, *, frames: bool = True
) -> tuple[FaultyUpstream, FaultyUpstream]:
    bad, good = await harness.fleet(model, 2, frames=frames)
    await harness.put_behind_a_proxy(bad)
    await harness.prefer(bad)
    return bad, good


async def test_33_a_partition_without_a_reset_is_retried_elsewhere(harness: Harness, model: str) -> None:
    bad, good = await behind_a_proxy(harness, model)
    assert bad.proxy is not None
    async with harness.expect(model, {"ok": 3}) as after:
        kept = await harness.post(model, stream=True)
        await kept.end()
        assert len(bad.log) == 1
        bad.proxy.partition()
        first, second = await asyncio.gather(harness.ask(model), harness.ask(model, stream=True))
        for reply in (first, second):
            assert reply.headers["x-tidegate-replica"] == good.id
        slowest_s = max(first.took_s, second.took_s)
        assert slowest_s < SILENT_S + CONNECT_S + 1.5 + after.stalls.seconds
        await bad.proxy.heal()
    assert len(good.log) == 2


async def test_33_an_unanswered_connection_is_retried_elsewhere(harness: Harness, model: str) -> None:
    """By frames there is a connection before the first request: that is the test above."""
    bad, good = await behind_a_proxy(harness, model, frames=False)
    assert bad.proxy is not None
    async with harness.expect(model, {"ok": 1}) as after:
        bad.proxy.partition()
        reply = await harness.ask(model)
        assert reply.headers["x-tidegate-replica"] == good.id
        assert CONNECT_S * 0.9 <= reply.took_s <= CONNECT_S + 1.5 + after.stalls.seconds
        await bad.proxy.heal()


async def test_34_a_closed_idle_connection_is_replaced(harness: Harness, model: str) -> None:
    (one,) = await harness.fleet(model, 1, frames=False)
    async with harness.expect(model, {"ok": 20}, attempts=20):
        for _ in range(10):
            await harness.ask(model)
            assert one.close_idle() == 1
            await harness.ask(model)  # the close and the request cross on their way


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_34_a_request_that_had_arrived_counts_as_an_attempt(
    harness: Harness, model: str, how: str
) -> None:
    """A kept connection that ends once the request was read is no closed idle connection."""
    fleet = await harness.fleet(model, 2)
    for one in fleet:
        await harness.prefer(one)
        await harness.ask(model)

    async def end(exchange: Exchange) -> None:
        getattr(exchange, how)()

    for one in fleet:
        one.faults["poison"] = end
    async with harness.expect(model, {"upstream_failed": 1}, attempts=2):
        assert (await harness.ask(model, "poison", stream=True)).status == 502
    assert [sum(hit.text == "poison" for hit in one.log) for one in fleet] == [1, 1]
