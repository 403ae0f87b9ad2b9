"""Rows 35, 36 and 40: an orderly stop interrupts no stream, and a killed worker is replaced."""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults import faults
from tests.faults.harness import Harness
from tests.faults.live import MODEL, Live
from tests.gateway.worker import until

pytestmark = pytest.mark.process


@pytest_asyncio.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    made = Harness(tmp_path, {"drain_timeout_s": 60})
    await made.start_controller()
    yield made
    await made.close()


async def test_35_sigterm_of_the_gateway_finishes_fifty_streams(harness: Harness) -> None:
    await harness.start_worker()
    model = harness.fresh_model()
    finish = asyncio.Event()
    (one,) = await harness.fleet(model, 1, usual=faults.held(finish))
    streams = 50
    async with harness.expect(model, {"ok": streams}, attempts=streams):
        clients = await harness.streams(model, streams)
        harness.workers[0].send_signal(signal.SIGTERM)

        async def draining() -> bool:
            ready = await harness.admin.get("/readyz")
            return ready.status_code == 503 and ready.json()["reasons"] == ["draining"]

        await until(draining, "readiness is off")
        assert not any(client.reply.whole for client in clients)
        finish.set()
        for reply in await asyncio.gather(*(client.end() for client in clients)):
            assert reply.error is None
        assert await harness.workers[0].wait() == 0
        await until(lambda: not one.connections, "nothing is left at the replica")
        assert not one.aborted
        await harness.reconnect_admin()
        await harness.start_worker()  # as the supervisor does
        await harness.ready(one)


async def test_36_a_killed_worker_is_replaced_and_serves(harness: Harness) -> None:
    """The next one serves with the keys of the document and the last fleet, without a controller."""
    key = "sk-of-the-tests"
    harness.tenants = [{"name": "a", "keys_sha256": [hashlib.sha256(key.encode()).hexdigest()]}]
    with_key = {"authorization": f"Bearer {key}"}
    await harness.start_worker()
    model = harness.fresh_model()
    (one,) = await harness.fleet(model, 1, usual=faults.held(asyncio.Event()))
    saved = harness.root / "fleet.json"
    await until(lambda: saved.exists() and one.id in saved.read_text(), "the fleet is on disk")
    async with harness.expect(model, {"ok": 1}):
        cut = await harness.post(model, stream=True, headers=with_key)
        await cut.events(3)
        await harness.controller.stop()
        harness.workers[0].send_signal(signal.SIGKILL)
        await harness.workers[0].wait()
        while await cut.read():
            pass
        assert cut.reply.cut  # a killed worker cannot send an error event
        await until(lambda: not one.connections, "the replica is rid of it")
        await harness.reconnect_admin()
        await harness.start_worker()
        await until(lambda: harness.admissible(one.id), "the last fleet")
        one.usual = faults.reply()
        assert (await harness.ask(model, headers=with_key)).status == 200
        refused = await harness.ask(model)
        assert refused.status == 401
        assert (await harness.ask(model, headers={"authorization": "Bearer sk-other"})).status == 401


@pytest.mark.parametrize("reported", ["by the replica", "by the fleet"])
async def test_40_a_draining_replica_finishes_its_streams(harness: Harness, reported: str) -> None:
    await harness.start_worker()
    model = harness.fresh_model()
    finish = asyncio.Event()
    leaving, staying = await harness.fleet(model, 2, usual=faults.held(finish))
    async with harness.expect(model, {"ok": 30}, attempts=30):
        clients = await harness.streams(model, 20)
        hits = len(leaving.log)
        assert hits > 0
        if reported == "by the replica":
            leaving.report(state="draining")
        else:
            harness.controller.set(staying)
        await harness.out_of_rotation(leaving.id)
        later = await asyncio.gather(*(harness.ask(model) for _ in range(10)))
        assert {reply.headers["x-tidegate-replica"] for reply in later} == {staying.id}
        assert len(leaving.log) == hits
        if reported == "by the replica":
            harness.controller.set(staying)
        finish.set()
        for reply in await asyncio.gather(*(client.end() for client in clients)):
            assert reply.error is None
        await until(lambda: not leaving.connections, "no connection is left")


async def test_40_scaling_down_ends_an_engine_after_its_streams(tmp_path: Path) -> None:
    async with Live(tmp_path).running(2) as live:
        before = await live.settle(2)
        async with live.expect(MODEL, {"ok": 30}):
            clients = await live.streams(MODEL, 20, max_tokens=200, ignore_eos=True)
            assert {client.reply.headers["x-tidegate-replica"] for client in clients} == set(before)
            await live.call_controller("POST", "/scale", {"model": MODEL, "replicas": 1})
            later = [asyncio.create_task(live.ask(MODEL, max_tokens=2)) for _ in range(10)]
            replies = await asyncio.gather(*(client.end() for client in clients), *later)
            assert all(reply.status == 200 and reply.error is None for reply in replies)
            await live.settle(1)
