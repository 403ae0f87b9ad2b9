"""Rows 18 to 21: a client disconnect frees all resources in every phase of its request."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.faults import faults
from tests.faults.faulty_upstream import FaultyUpstream
from tests.faults.harness import Harness
from tests.gateway.worker import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
# The limits of the rows.
FREED_S = 1.0
GATEWAY = {"queue_timeout_s": 30, "max_queue": 1000}


async def left_at(upstream: FaultyUpstream) -> float:
    await until(lambda: len(upstream.aborted) == 1, "the request is aborted")
    (left,) = upstream.aborted
    assert left.left_at is not None
    return left.left_at


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_18_a_disconnect_frees_its_slot(harness: Harness, model: str, path: str, reset: bool) -> None:
    (one,) = await harness.fleet(model, 1, usual=faults.paced(1000, 0.01))
    async with harness.expect(model, {"cancelled": 1}, attempts=1) as after:
        client = await harness.post(model, path=path, stream=True)
        await client.events(5)
        gone = client.leave(reset=reset)
        assert await left_at(one) - gone <= FREED_S + after.stalls.seconds
    # Generated tokens are counted although the client disconnected.
    assert await harness.metric("tidegate_tokens_total", model=model, kind="completion") >= 5


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True])
async def test_18_19_a_disconnect_before_the_first_byte_frees_its_slot(
    harness: Harness, model: str, stream: bool, reset: bool
) -> None:
    (one,) = await harness.fleet(model, 1, usual=faults.stalling() if stream else faults.silent)
    async with harness.expect(model, {"cancelled": 1}, attempts=1) as after:
        client = await harness.post(model, stream=stream)
        await until(lambda: len(one.open) == 1)
        gone = client.leave(reset=reset)
        assert await left_at(one) - gone <= FREED_S + after.stalls.seconds


@pytest.mark.parametrize("stream", [False, True])
async def test_20_a_disconnect_while_queued_frees_all(harness: Harness, model: str, stream: bool) -> None:
    (one,) = await harness.fleet(model, 1, usual=faults.silent, bound=1)
    async with harness.expect(model, {"cancelled": 2}, attempts=1):
        holder = await harness.post(model)
        await until(lambda: len(one.open) == 1)
        waiting = await harness.post(model, stream=stream)
        await harness.reaches(1, "tidegate_queue_depth", model=model)
        waiting.leave()
        await harness.reaches(0, "tidegate_queue_depth", model=model)
        holder.leave()
        await left_at(one)
        one.usual = faults.reply()
    assert len(one.log) == 1


async def test_21_five_hundred_random_disconnects_leak_nothing(harness: Harness, model: str) -> None:
    clients, together = 500, 100
    draw = random.Random(21)  # noqa: S311 - moments
    await harness.fleet(model, 2, usual=faults.paced(20, 0.01, first_s=0.05), bound=30)
    await harness.ask(model)  # the service time is known, so that no request is refused by an estimate
    room, resets = asyncio.Semaphore(together), list[bool]()
    async with harness.expect(model) as after:

        async def visit(stream: bool, stays_s: float, reset: bool) -> None:
            async with room:
                client = await harness.post(model, stream=stream)
                try:
                    async with asyncio.timeout(stays_s):
                        await client.end()
                except TimeoutError:
                    client.leave(reset=reset)
                    resets.append(reset)

        visits = [(draw.random() < 0.7, draw.uniform(0.0, 0.5), draw.random() < 0.5) for _ in range(clients)]
        await asyncio.gather(*(visit(*one) for one in visits))

        async def counted() -> bool:
            # A reset discards a request that a busy worker has not read yet.
            return clients - sum(resets) <= (await after.outcomes()).total() <= clients

        await until(counted, "every visit ended")
        outcomes = await after.outcomes()
        assert set(outcomes) <= {"ok", "cancelled"}
        assert outcomes["cancelled"] > clients / 4
    # No slot leaked: all slots serve again.
    replies = await asyncio.gather(*(harness.ask(model) for _ in range(60)))
    assert {reply.status for reply in replies} == {200}
