"""Row 41: a joining replica gets no request before it is ready, or for adapters it lacks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from policy.wire.adapter_catalog import served_name
from tests.faults.faulty_upstream import FaultyUpstream
from tests.faults.harness import Harness
from tests.gateway.fake_replica import alias
from tests.gateway.worker import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
DIGEST = "d" * 64


async def connected(harness: Harness, upstream: FaultyUpstream) -> None:
    async def reported() -> bool:
        links = (await harness.admin.get("/admin/fleet")).json()["replicas"]
        return any(link["id"] == upstream.id and link["heard_s_ago"] is not None for link in links)

    await until(reported, "the replica reports its load")


async def joining(harness: Harness, model: str, **more: Any) -> tuple[FaultyUpstream, FaultyUpstream]:
    (warm,) = await harness.fleet(model, 1, **more)
    cold = harness.upstream(model)
    cold.state = "starting"
    await cold.start()
    return warm, cold


async def test_41_a_replica_gets_no_request_before_it_is_ready(harness: Harness, model: str) -> None:
    warm, cold = await joining(harness, model)
    async with harness.expect(model, {"ok": 80}):

        async def ask(count: int) -> set[str]:
            await harness.prefer(cold)
            replies = [await harness.ask(model) for _ in range(count)]
            return {reply.headers["x-tidegate-replica"] for reply in replies}

        harness.controller.set(warm)
        harness.controller.replicas += [cold.entry("starting")]
        assert await ask(20) == {warm.id}
        harness.controller.set(warm, cold)
        await connected(harness, cold)
        assert await ask(20) == {warm.id}
        assert not cold.log
        cold.report(state="ready")
        await until(lambda: harness.admissible(cold.id), "it may be used")
        assert cold.id in await ask(40)


async def test_41_requests_wait_for_the_only_replica_to_start(harness: Harness, model: str) -> None:
    cold = harness.upstream(model)
    cold.state = "starting"
    await cold.start()
    async with harness.expect(model, {"ok": 5}, attempts=5):
        harness.controller.set(cold)
        await connected(harness, cold)
        clients = [await harness.post(model) for _ in range(5)]
        await asyncio.sleep(0.3)
        assert not cold.log
        cold.report(state="ready")
        for client in clients:
            assert (await client.end()).status == 200


async def test_41_a_replica_without_the_adapter_gets_no_adapter_request(harness: Harness, model: str) -> None:
    served = served_name("sql", DIGEST)
    warm, cold = await joining(harness, model)
    warm.report(adapters=[served])
    await harness.publish(alias("sql", DIGEST, model=model))
    async with harness.expect(model, {"ok": 40}, attempts=40):
        cold.report(state="ready")
        await harness.ready(warm, cold)
        await harness.shows(warm, adapters=[served])
        for _ in range(20):
            assert (await harness.ask("sql")).headers["x-tidegate-replica"] == warm.id
        assert not cold.log
        cold.report(adapters=[served])
        await harness.shows(cold, adapters=[served])
        await harness.prefer(cold)
        found = [(await harness.ask("sql")).headers["x-tidegate-replica"] for _ in range(20)]
        assert cold.id in found
