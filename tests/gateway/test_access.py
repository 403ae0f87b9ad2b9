"""Keys, accounts and explanations, through a real worker."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.gateway.fake_replica import ANSWER, Exchange, hold
from tests.gateway.worker import Stack, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

WEB, NIGHT, BOSS = "key-of-web", "key-of-night", "key-of-boss"
CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}


def tenant(name: str, *keys: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "keys_sha256": [hashlib.sha256(key.encode()).hexdigest() for key in keys], **more}


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A worker with three tenants."""
    stack = Stack(tmp_path_factory.mktemp("access"))
    stack.tenants = TENANTS
    await stack.start_controller()
    await stack.start_worker()
    yield stack
    await stack.close()


TENANTS = [
    tenant("web", WEB, weight=3.0),
    tenant("night", NIGHT, priority="batch"),
    tenant("boss", BOSS, admin=True),
]


async def ask(stack: Stack, key: str, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    headers = bearer(key, **more.pop("headers", {}))
    return await stack.http.post(path, json={**CHAT, **more}, headers=headers)


async def test_requests_without_a_valid_key_are_401_and_reach_no_replica(shared: Stack) -> None:
    replica = await shared.serve("guarded")
    refused = [
        await shared.http.post("/v1/chat/completions", json=CHAT),
        await ask(shared, "wrong"),
        await ask(shared, "wrong", model="no-such-model"),
        await shared.http.post("/v1/chat/completions", content=b"{no json"),
        await shared.http.get("/v1/models"),
        await shared.http.get("/v1/models/alpha"),
    ]
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["x-request-id"]
    anthropic = await shared.http.post("/v1/messages", json={**CHAT, "max_tokens": 1})
    assert anthropic.json()["error"]["type"] == "authentication_error"
    assert (await shared.http.get("/v1/secret")).status_code == 404
    assert replica.hits == []


@pytest.mark.parametrize(
    ("line", "key", "length", "status"),
    [
        ("POST /v1/chat/completions", "wrong", 9_999_999, 401),
        ("POST /v1/secret", WEB, 9_999_999, 404),
        ("PUT /v1/chat/completions", WEB, 9_999_999, 405),
        ("POST /v1/models", WEB, 9, 405),
        ("GET /v1/models", WEB, 9, 200),
        ("POST /v1/chat/completions", WEB, 99_999_999, 413),
        ("POST /v1/chat/completions", f"{WEB}\r\ncontent-encoding: gzip", 9_999_999, 415),
        ("POST /v1/chat/completions", WEB, None, 415),
        ("POST /v1/chat/completions", WEB, 9, 100),
    ],
)
async def test_route_key_and_size_are_checked_before_the_body_is_read(
    shared: Stack, line: str, key: str, length: int | None, status: int
) -> None:
    reader, writer = await asyncio.open_connection(*shared.client_socket.getsockname())
    framing = "transfer-encoding: gzip, chunked" if length is None else f"content-length: {length}"
    head = f"{line} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{framing}"
    writer.write(f"{head}\r\nexpect: 100-continue\r\n\r\n".encode())
    assert (await reader.readline()).split()[1] == str(status).encode()
    writer.close()


async def test_a_page_can_read_answers_and_what_is_refused_before_the_body_is_read(shared: Stack) -> None:
    page, chat = "https://app.example", "POST /v1/chat/completions"
    shared.gateway["cors"] = [page]
    shared.write_document()

    async def allows(origin: str, line: str, *more: str) -> tuple[int, str | None, list[str]]:
        """The status of the answer to a page of ``origin``, who may read it, and what it depends on."""
        reader, writer = await asyncio.open_connection(*shared.client_socket.getsockname())
        lines = [f"{line} HTTP/1.1", "host: x", *([f"origin: {origin}"] if origin else []), *more]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        status, *head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        writer.close()
        headers = [(name, value) for name, _, value in (each.partition(": ") for each in head)]
        varies = [value for name, value in headers if name == "vary"]
        return int(status.split()[1]), dict(headers).get("access-control-allow-origin"), varies

    async def is_in_force() -> bool:
        return (await allows(page, "GET /health"))[1] == page

    key, length = f"authorization: Bearer {WEB}", "content-length: 99999999"
    try:
        await until(is_in_force)
        for status, line, *more in (
            (401, chat, "authorization: Bearer wrong", length),
            (404, "POST /v1/secret", key, length),
            (405, "PUT /v1/chat/completions", key, length),
            (413, chat, key, length),
            (415, chat, key, "content-encoding: gzip", length),
            (431, chat, key, length, *["x: y"] * 100),
            (400, chat, key, length, "host: y"),
        ):
            assert await allows(page, line, *more) == (status, page, ["origin"])
            assert await allows("https://evil.example", line, *more) == (status, None, ["origin"])
            assert await allows("", line, *more) == (status, None, ["origin"])
        for stream in (False, True):
            for origin, allowed in ((page, page), ("https://evil.example", None)):
                headers = {"authorization": f"Bearer {WEB}", "origin": origin}
                answer = await shared.http.post(
                    "/v1/chat/completions", json={**CHAT, "stream": stream}, headers=headers
                )
                assert (answer.status_code, answer.headers["vary"]) == (200, "Origin")
                assert answer.headers.get("access-control-allow-origin") == allowed
        wanted = "access-control-request-method: POST"
        assert (await allows(page, "OPTIONS /v1/chat/completions", wanted))[:2] == (200, page)
    finally:
        del shared.gateway["cors"]
        shared.write_document()


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v1/chat/completions", 200),
        ("/v1/chat/completions?x=/../y", 200),
        ("/v1/ch%61t/completions", 200),
        ("http://other/v1/chat/completions", 200),
        ("http://other/admin/fleet", 404),
        ("//v1/chat/completions", 404),
        ("/v1//chat/completions", 404),
        ("/v1/chat/completions/", 404),
        ("/v1/chat/completions;a=b", 404),
        ("/v1/chat/completions%00", 404),
        ("/V1/chat/completions", 404),
        ("/v1/./chat/completions", 404),
        ("/v1/x/../chat/completions", 404),
        ("/v1/x/%2e%2e/chat/completions", 404),
        ("/v1%2fchat%2fcompletions", 200),
        ("/v1\\chat/completions", 404),
        ("/v1/load_lora_adapter", 404),
        ("/v1/..%2fload_lora_adapter", 404),
        ("v1/chat/completions", 400),
        ("*", 404),
    ],
)
async def test_no_spelling_of_a_path_reaches_another_route(shared: Stack, target: str, status: int) -> None:
    replica = await shared.serve("paths")
    reader, writer = await asyncio.open_connection(*shared.client_socket.getsockname())
    body = json.dumps(CHAT).encode()
    head = f"POST {target} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {WEB}\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    assert answer.split()[1] == str(status).encode()
    assert [hit.path for hit in replica.hits] == ["/v1/chat/completions"] * (status == 200)


async def test_a_replica_gets_known_fields_and_media_from_allowed_hosts_only(shared: Stack) -> None:
    replica = await shared.serve("fields")
    for stream in (False, True):
        answer = await ask(shared, WEB, stream=stream, **{"kv_power": 1, "no name\r\n": 2, "store": True})
        assert answer.headers["x-tidegate-dropped-fields"] == "kv_power, *"
        assert {"kv_power", "no name\r\n"} - set(replica.hits[-1].json) == {"kv_power", "no name\r\n"}
        assert replica.hits[-1].json["store"] is True
    assert "x-tidegate-dropped-fields" not in (await ask(shared, WEB)).headers
    before = len(replica.hits)
    for url in ("https://internal.example/a.png", "file:///etc/passwd"):
        image = {"type": "image_url", "image_url": {"url": url}}
        refused = await ask(shared, WEB, messages=[{"role": "user", "content": [image]}])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert len(replica.hits) == before


async def test_a_compressed_body_is_refused_by_name(shared: Stack) -> None:
    headers = bearer(WEB, **{"content-encoding": "GZIP"})
    answer = await shared.http.post("/v1/chat/completions", content=gzip.compress(b"{}"), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert answer.headers["accept-encoding"] == "identity"
    replica = await shared.serve("a")
    headers["content-encoding"] = "identity"
    assert (await shared.http.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
    assert len(replica.hits) == 1


async def test_a_key_is_accepted_in_either_header_and_not_forwarded(shared: Stack) -> None:
    replica = await shared.serve("keys")
    assert (await ask(shared, WEB)).content == ANSWER
    anthropic = await shared.http.post("/v1/chat/completions", json=CHAT, headers={"x-api-key": NIGHT})
    assert anthropic.status_code == 200
    models = (await shared.http.get("/v1/models", headers=bearer(WEB))).json()["data"]
    assert {model["id"] for model in models} == {"alpha", "vectors"}
    for hit in replica.hits:
        assert "authorization" not in hit.headers
        assert "x-api-key" not in hit.headers
        assert WEB not in str(hit.headers) + hit.body.decode()


async def test_the_cache_salt_of_a_tenant_overrides_the_clients(shared: Stack) -> None:
    replica = await shared.serve("salts")
    salts = []
    for key, fields in (
        (WEB, {}),
        (WEB, {"cache_salt": "mine"}),
        (NIGHT, {}),
        (NIGHT, {"cache_salt": "web's"}),
    ):
        assert (await ask(shared, key, **fields)).status_code == 200
        salts.append(replica.hits[-1].json["cache_salt"])
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert all(len(salt) == 32 for salt in salts)
    assert "web" not in salts[0]


async def test_a_key_is_revoked_and_admitted_by_a_document(shared: Stack) -> None:
    replica = await shared.serve("revoking")
    running = asyncio.Event()
    release = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        running.set()
        await hold(release)(exchange)

    replica.answer = answer
    asked = asyncio.create_task(ask(shared, WEB))
    await running.wait()
    shared.tenants = [tenant("web", "new-key"), *TENANTS[1:]]
    shared.write_document()
    await shared.answers(401, "/v1/models", bearer(WEB))
    assert (await shared.http.get("/v1/models", headers=bearer("new-key"))).status_code == 200
    release.set()
    assert (await asked).status_code == 200  # an admitted request continues
    shared.tenants = TENANTS
    shared.write_document()
    await shared.answers(200, "/v1/models", bearer(WEB))


async def test_only_an_admin_gets_the_routing_decision(shared: Stack) -> None:
    await shared.serve("explained")
    asked = {"headers": {"x-tidegate-explain": "1"}}
    assert "x-tidegate-explain" not in (await ask(shared, WEB, **asked)).headers
    assert "x-tidegate-explain" not in (await ask(shared, BOSS)).headers
    answer = await ask(shared, BOSS, **asked)
    assert answer.headers["x-tidegate-replica"] == "explained"
    decision = json.loads(answer.headers["x-tidegate-explain"])
    assert decision["replica"] == "explained"
    assert [candidate["replica"] for candidate in decision["candidates"]] == ["explained"]
    assert all("total_s" in candidate for candidate in decision["candidates"])
    streamed = await ask(shared, BOSS, stream=True, **asked)
    assert json.loads(streamed.headers["x-tidegate-explain"])["replica"] == "explained"


async def test_the_token_of_the_admin_port_is_enough_for_its_playground(shared: Stack) -> None:
    await shared.serve("played")
    for stream in (False, True):
        body = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        answer = await shared.admin.post("/admin/playground", json=body)
        assert (answer.status_code, answer.headers["x-tidegate-replica"]) == (200, "played")
        assert json.loads(answer.headers["x-tidegate-explain"])["replica"] == "played"
        assert answer.text.endswith("data: [DONE]\n\n") is stream
    body = {"model": "unknown", "messages": []}
    assert (await shared.admin.post("/admin/playground", json=body)).status_code == 404


async def test_the_admin_port_keeps_the_last_decisions_and_the_accounts(shared: Stack) -> None:
    await shared.serve("admin")
    before = {entry["name"]: entry for entry in (await shared.admin.get("/admin/tenants")).json()["tenants"]}
    for key in (WEB, WEB, NIGHT):
        assert (await ask(shared, key)).status_code == 200
    kept = (await shared.admin.get("/admin/routes", params={"limit": 2})).json()
    assert kept["worker"] == shared.workers[0].pid
    assert [route["tenant"] for route in kept["routes"]] == ["night", "web"]
    assert (await shared.admin.get("/admin/routes", params={"limit": 0})).status_code == 400
    answer = await shared.admin.get("/admin/tenants")
    accounts = {entry["name"]: entry for entry in answer.json()["tenants"]}
    assert {name: entry["weight"] for name, entry in accounts.items()} == {
        "web": 3.0,
        "night": 1.0,
        "boss": 1.0,
    }
    assert accounts["night"]["priority"] == "batch"
    assert accounts["web"]["in_flight"] == 0
    assert accounts["web"]["prompt_tokens"] - before["web"]["prompt_tokens"] == 2
    counted = {"tenant": "web", "kind": "prompt"}
    assert await shared.metric("tidegate_tenant_tokens_total", **counted) == accounts["web"]["prompt_tokens"]
    assert await shared.metric("tidegate_tenant_requests_total", tenant="night", outcome="ok") >= 1
    assert 'model=""' not in (await shared.admin.get("/metrics")).text
    for entry in TENANTS:
        assert entry["keys_sha256"][0][:8] not in answer.text
