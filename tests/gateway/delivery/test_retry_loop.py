"""Retries, ejections and probes, with real workers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from functools import partial

import httpx
import pytest
import pytest_asyncio

from tests.gateway.fake_replica import (
    ANSWER,
    STREAM,
    Exchange,
    FakeReplica,
    answer_json,
    event,
    hold,
    plain_server,
    stream,
)
from tests.gateway.worker import Stack, model, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
PROGRESS_S = 2.0
LIMITS = {
    "queue_timeout_s": 15,
    "progress_timeout_s": PROGRESS_S,
    "eject": {"failures": 3, "base_s": 0.4, "max_s": 2, "window_s": 5},
}
# A model for each test, because breakers and retry budgets are per model.
MODELS = [f"model-{i}" for i in range(16)]
_unused = itertools.cycle(MODELS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ejecting(tmp_path_factory: pytest.TempPathFactory, way: str) -> AsyncIterator[Stack]:
    """A worker that ejects after few failures and for a short time."""
    stack = Stack(tmp_path_factory.mktemp("delivery"))
    stack.gateway = {**LIMITS, "replica_protocol": way}
    stack.models = [model(name) for name in MODELS]
    await stack.start_controller()
    await stack.start_worker()
    yield stack
    await stack.close()


async def fleet(ejecting: Stack, count: int) -> list[FakeReplica]:
    name = next(_unused)
    replicas = [await ejecting.replica(f"{name}-{i}", model=name) for i in range(count)]
    await ejecting.ready(*replicas)
    return replicas


async def fail(exchange: Exchange) -> None:
    await exchange.reply(b'{"error": {"message": "boom"}}', status=500)


async def ask(ejecting: Stack, replica: FakeReplica) -> httpx.Response:
    return await ejecting.chat(model=replica.model)


async def busy(ejecting: Stack, replica: FakeReplica, in_flight: int) -> None:
    """Let ``replica`` report ``in_flight``, and wait until the worker knows it."""
    replica.report(in_flight=in_flight)
    await ejecting.shows(replica, in_flight=in_flight)


async def breaker(ejecting: Stack, replica: FakeReplica) -> str:
    seen = (await ejecting.admin.get("/admin/fleet")).json()["replicas"]
    return next(str(entry["breaker"]) for entry in seen if entry["id"] == replica.id)


async def test_an_ejected_replica_returns_after_a_canary(ejecting: Stack) -> None:
    fails, works = await fleet(ejecting, 2)
    fails.answer = fail
    await busy(ejecting, works, 6)
    for _ in range(3):
        assert (await ask(ejecting, fails)).status_code == 200
    assert await breaker(ejecting, fails) != "closed"
    assert len(chats(fails)) == 3

    await until(lambda: len(fails.hits) >= 5, "a canary, and after its failure another")
    canary = fails.hits[-1]
    assert (canary.path, canary.json["max_tokens"]) == ("/v1/completions", 1)
    assert (await ask(ejecting, works)).headers["x-tidegate-replica"] == works.id
    fails.answer = answer_json
    await ejecting.shows(fails, breaker="closed")  # its canary was answered
    assert (await ask(ejecting, fails)).headers["x-tidegate-replica"] == fails.id
    assert await ejecting.metric("tidegate_ejections_total", model=fails.model) == 1
    assert await ejecting.metric("tidegate_probes_total", model=fails.model, outcome="good") == 1
    assert await ejecting.metric("tidegate_probes_total", model=fails.model, outcome="bad") >= 1


@pytest.mark.parametrize(("status", "ejections"), [(400, 0), (500, 1)])
async def test_what_a_request_makes_impossible_counts_against_no_replica(
    ejecting: Stack, status: int, ejections: int
) -> None:
    stops, other = await fleet(ejecting, 2)
    read = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.head("text/event-stream")
        await exchange.chunk(event("a"))
        await read.wait()
        await exchange.chunk(b'data: {"error": {"message": "no token", "code": %d}}\n\n' % status)

    stops.answer = answer
    await busy(ejecting, other, 6)
    for _ in range(3):
        read.clear()
        body = {"model": stops.model, "messages": [], "stream": True}
        async with ejecting.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            text = ""
            async for piece in stream.aiter_text():
                text += piece
                read.set()
        assert ('"invalid_request_error"' in text) == (status == 400)
    assert await ejecting.metric("tidegate_ejections_total", model=stops.model) == ejections


def chats(replica: FakeReplica) -> list[Exchange]:
    return [hit for hit in replica.hits if hit.path == "/v1/chat/completions"]


async def test_a_replica_that_computes_tokens_is_not_ejected(ejecting: Stack) -> None:
    computes, other = await fleet(ejecting, 2)
    release = asyncio.Event()
    computes.answer = hold(release)
    await busy(ejecting, other, 7)
    asked = asyncio.create_task(ask(ejecting, computes))
    await until(lambda: len(computes.hits) == 1)
    load = computes.load

    def counting() -> dict[str, object]:
        return {**load(), "tokens": int(time.monotonic() * 1000)}

    computes.load = counting  # type: ignore[method-assign]
    until_s = time.monotonic() + 1.5 * PROGRESS_S
    while time.monotonic() < until_s:
        computes.report()
        await asyncio.sleep(0.2)
    release.set()
    assert (await asked).headers["x-tidegate-replica"] == computes.id
    assert await ejecting.metric("tidegate_ejections_total", model=computes.model) == 0


async def test_a_serving_replica_stays_admitted_if_its_load_stream_hangs(ejecting: Stack) -> None:
    (silent,) = await fleet(ejecting, 1)
    run = silent.respond

    async def send_no_load(exchange: Exchange) -> None:
        if exchange.path == "/internal/load":
            await exchange.gone.wait()
        else:
            await run(exchange)

    silent.respond = send_no_load  # type: ignore[method-assign]
    for connection in list(silent.connections):
        connection.transport.abort()
    await until(lambda: ejecting.admits(set()), "its load stream is gone")
    asked = asyncio.create_task(ask(ejecting, silent))
    await until(lambda: any("max_tokens" in hit.json for hit in silent.hits), "a canary probes it")
    assert (await asked).status_code == 200
    assert (await ask(ejecting, silent)).status_code == 200


async def external(stack: Stack, count: int) -> list[FakeReplica]:
    """External servers: they list their models, and answer chats by ``answer``."""
    servers = []
    for i in range(count):
        server = FakeReplica(f"server-{i}")

        async def run(exchange: Exchange, server: FakeReplica = server) -> None:
            server.hits.append(exchange)
            await server.answer(exchange)

        server.respond = partial(plain_server, serve=run)  # type: ignore[method-assign]
        await server.start()
        stack.replicas.append(server)
        servers.append(server)
    stack.gateway = LIMITS
    stack.models = [{"name": "alpha", "engine": "external", "urls": [server.url for server in servers]}]
    await stack.start_worker()
    names = {server.url.removeprefix("http://") for server in servers}
    await until(lambda: stack.admits(names), "the servers are known")
    return servers


@pytest.mark.asyncio(loop_scope="function")
async def test_requests_do_not_wait_for_external_servers_that_are_down(stack: Stack) -> None:
    (server,) = await external(stack, 1)
    assert (await stack.chat()).content == ANSWER

    async def full(exchange: Exchange) -> None:
        await exchange.refuse("busy")

    server.answer = full
    waits = asyncio.create_task(stack.chat())  # for a server that is there
    await until(lambda: len(server.hits) >= 2)
    await server.stop()
    await until(lambda: stack.admits(set()), "it is known")
    assert (await waits).status_code == 503
    server.answer = answer_json
    answer = await stack.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    assert "retry-after" in answer.headers
    await server.start()
    await until(lambda: stack.admits({server.url.removeprefix("http://")}), "it is back")
    assert (await stack.chat()).content == ANSWER


@pytest.mark.asyncio(loop_scope="function")
async def test_a_stream_moves_from_a_hung_server_that_left_the_deployment(stack: Stack) -> None:
    servers = await external(stack, 2)
    for server in servers:
        server.answer = hold(asyncio.Event())
    asked = asyncio.create_task(stack.chat(stream=True))
    await until(lambda: any(server.hits for server in servers), "one has it")
    hangs, works = sorted(servers, key=lambda server: not server.hits)
    works.answer = stream(STREAM)
    stack.models[0]["urls"] = [works.url]
    stack.write_document()
    await until(lambda: stack.admits({works.url.removeprefix("http://")}), "it has left")
    assert (await asked).content == STREAM
    assert len(hangs.hits) == len(works.hits) == 1


@pytest.mark.asyncio(loop_scope="function")
async def test_an_external_server_is_probed_by_one_client_request(stack: Stack) -> None:
    fails, works = await external(stack, 2)
    fails.answer = fail
    while await stack.metric("tidegate_ejections_total", model="alpha") == 0:
        assert (await stack.chat()).status_code == 200
    seen = len(fails.hits)
    assert seen == 3
    await stack.reaches(1, "tidegate_breakers", model="alpha", state="half_open")
    assert len(fails.hits) == seen
    release = asyncio.Event()
    fails.answer = works.answer = hold(release)
    works.hits.clear()
    asked = [asyncio.create_task(stack.chat()) for _ in range(6)]
    await until(lambda: len(fails.hits) + len(works.hits) >= seen + 6, "all were sent")
    assert len(fails.hits) == seen + 1
    release.set()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert await stack.metric("tidegate_probes_total", model="alpha", outcome="good") == 1
