"""What an external server has no slots for waits in the gateway's queue, in the order of priorities."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from typing import Any

import httpx
import pytest

from tests.gateway.fake_replica import Exchange, answer_json, plain_server
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.worker import Stack, until

pytestmark = pytest.mark.process
SLOTS, ASKED = 8, 300


class SlottedServer(FakeUpstream):
    """Serves :data:`SLOTS` requests at a time, from ``release`` on.

    Once it is ``full`` it reports the rest as waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.release = asyncio.Event()
        self.full = False
        self.asked: list[str] = []
        self.in_flight = 0
        self._slots = asyncio.Semaphore(SLOTS)

    async def respond(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            await exchange.reply(b'{"data": [{"id": "alpha"}]}')
        elif exchange.path == "/metrics":
            running = min(SLOTS, self.in_flight)
            labels = '{engine="0",model_name="alpha"}'
            metrics = (
                "# HELP vllm:num_requests_running Number of requests.\n"
                f"vllm:num_requests_running{labels} {running:.1f}\n"
                f"vllm:num_requests_waiting{labels} {(self.in_flight - running) * self.full:.1f}\n"
            )
            await exchange.reply(metrics.encode())
        else:
            self.asked.append(exchange.json["messages"][0]["content"])
            self.in_flight += 1
            async with self._slots:
                await self.release.wait()
                await answer_json(exchange)
            self.in_flight -= 1


async def ask(clients: httpx.AsyncClient, tenant: str) -> httpx.Response:
    messages = [{"role": "user", "content": tenant}]
    headers = {"authorization": f"Bearer {tenant}"}
    body = {"model": "alpha", "messages": messages}
    return await clients.post("/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize(
    ("given", "at_once", "bound"),
    # What is learned begins with 256, and once a minute with 0.8 of that.
    [({"max_in_flight": SLOTS}, SLOTS, SLOTS), ({}, 200, 100)],
    ids=["given", "learned"],
)
async def test_the_rest_waits_in_the_queue_and_a_critical_request_overtakes_it(
    stack: Stack, given: dict[str, Any], at_once: int, bound: int
) -> None:
    server = SlottedServer()
    await server.start()
    stack.servers.append(server)
    stack.models = [{"name": "alpha", "engine": "external", "urls": [{"url": server.url, **given}]}]
    stack.gateway = {"queue_timeout_s": 600}
    stack.tenants = [
        {"name": name, "priority": name, "keys_sha256": [hashlib.sha256(name.encode()).hexdigest()]}
        for name in ("batch", "critical")
    ]
    await stack.start_worker()
    await until(lambda: stack.admits({f"127.0.0.1:{server.port}"}), "the server is known")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=stack.url, timeout=200, limits=limits, trust_env=False) as clients:
        asked = [asyncio.create_task(ask(clients, "batch")) for _ in range(at_once)]
        await until(lambda: server.in_flight == at_once, "it is full")
        server.full = True

        async def bounded() -> bool:
            (seen,) = (await stack.admin.get("/admin/fleet")).json()["replicas"]
            return bool(seen["in_flight"] == at_once and seen["bound"] <= bound)

        await until(bounded, "its bound is in force")
        asked += [asyncio.create_task(ask(clients, "batch")) for _ in range(ASKED - at_once)]
        await stack.queued(ASKED - at_once)
        asked.append(asyncio.create_task(ask(clients, "critical")))
        await stack.queued(ASKED + 1 - at_once)
        server.release.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert server.asked.index("critical") == at_once
        assert len(server.asked) == ASKED + 1


class PlainServer(FakeUpstream):
    """Serves :data:`SLOTS` requests at a time, 5 ms a token, and has no metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = 0
        self._slots = asyncio.Semaphore(SLOTS)
        self._rng = random.Random(5)  # noqa: S311 - a workload

    async def respond(self, exchange: Exchange) -> None:
        await plain_server(exchange, self._serve)

    async def _serve(self, exchange: Exchange) -> None:
        self.in_flight += 1
        async with self._slots:
            tokens = self._rng.randrange(2, 16)
            await asyncio.sleep(0.005 * tokens)
        self.in_flight -= 1
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "x" * tokens},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
        await exchange.reply(json.dumps({"id": "a", "choices": [choice], "usage": usage}).encode())


async def test_the_bound_is_learned_from_whole_answers_too(stack: Stack) -> None:
    """It stayed at 256."""
    server = PlainServer()
    await server.start()
    stack.servers.append(server)
    stack.models = [{"name": "alpha", "engine": "external", "urls": [server.url]}]
    await stack.start_worker()
    await until(lambda: stack.admits({f"127.0.0.1:{server.port}"}), "the server is known")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=stack.url, timeout=200, limits=limits, trust_env=False) as clients:
        body = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}

        async def ask_on() -> None:
            while True:
                assert (await clients.post("/v1/chat/completions", json=body)).status_code == 200

        asking = [asyncio.create_task(ask_on()) for _ in range(200)]

        async def is_bounded() -> bool:
            (seen,) = (await stack.admin.get("/admin/fleet")).json()["replicas"]
            return bool(seen["bound"] <= 8 * SLOTS and server.in_flight >= SLOTS)

        await until(is_bounded, "the bound is near what it serves at a time")
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
