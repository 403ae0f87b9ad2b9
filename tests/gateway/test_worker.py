"""The life of a worker: how it learns of the fleet, shares its port, and drains."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
from typing import Any

import httpx
import pytest

from tests.gateway.certificate import certify
from tests.gateway.fake_replica import ANSWER, STREAM, Exchange, FakeReplica, forever, stream
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.worker import PATIENCE_S, Stack, model, until

pytestmark = pytest.mark.process
CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}


async def started(stack: Stack, *, workers: int = 1) -> FakeReplica:
    await stack.start_controller()
    for number in range(workers):
        await stack.start_worker(number)
    return await stack.serve("one", bound=100)


async def test_a_worker_without_a_fleet_is_not_ready_and_reports_why(stack: Stack) -> None:
    await stack.start_worker()
    answer = await stack.admin.get("/readyz")
    assert answer.status_code == 503
    assert "controller" in answer.json()["reasons"][0]
    answer = await stack.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-timeout-s": "0.05"})
    assert answer.status_code == 503


async def test_the_series_of_models_are_made_before_clients_are_served(stack: Stack) -> None:
    await stack.start_worker()
    (counters,) = (stack.root / "metrics").glob("counter_*.db")
    assert b'"model": "alpha"' in counters.read_bytes()


async def test_two_workers_share_a_port_and_their_metrics(stack: Stack) -> None:
    await started(stack, workers=2)

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=PATIENCE_S) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200

    await asyncio.gather(*(ask() for _ in range(30)))
    await stack.reaches(30, "tidegate_requests_total", model="alpha", outcome="ok")

    stack.workers[0].send_signal(signal.SIGKILL)
    await stack.workers[0].wait()
    await asyncio.gather(*(ask() for _ in range(10)))
    await stack.start_worker(0)
    await asyncio.gather(*(ask() for _ in range(10)))


async def test_requests_that_outlast_the_drain_timeout_get_shutting_down(stack: Stack) -> None:
    stack.gateway["drain_timeout_s"] = 1
    replica = await started(stack)
    replica.answer = forever
    streaming = asyncio.create_task(stack.chat(stream=True))
    await until(lambda: len(replica.hits) == 1)
    stack.controller.set()
    await until(lambda: stack.admits(set()))
    queued = asyncio.create_task(stack.chat())
    await stack.queued(1)
    stack.workers[0].send_signal(signal.SIGTERM)
    answer = await streaming
    assert json.loads(answer.text.splitlines()[-2][6:])["error"]["code"] == "shutting_down"
    assert "[DONE]" not in answer.text
    assert ((await queued).status_code, (await queued).json()["error"]["code"]) == (503, "shutting_down")
    assert await stack.workers[0].wait() == 0


async def test_a_changed_document_is_taken_while_running(stack: Stack) -> None:
    await started(stack)
    stack.models.append(model("beta"))
    stack.write_document()
    await stack.answers(200, "/v1/models/beta")
    (stack.root / "deployment.json").write_text('{"models": 7}')
    line = b""
    while b"document_refused" not in line:
        assert stack.workers[0].stderr is not None
        line = await stack.workers[0].stderr.readline()
    assert (await stack.chat()).status_code == 200


async def external(stack: Stack, *listed: dict[str, Any], tls: ssl.SSLContext | None = None) -> FakeUpstream:
    """A running external server that lists these models, and answers as a model called "theirs"."""
    server = FakeUpstream(tls)

    async def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            await exchange.reply(json.dumps({"data": listed}).encode())
        elif exchange.path == "/metrics":
            await exchange.reply(b"{}", status=404)
        elif exchange.json.get("stream"):
            await stream(STREAM.replace(b'"alpha"', b'"theirs"'))(exchange)
        else:
            await exchange.reply(ANSWER.replace(b'"alpha"', b'"theirs"'))

    server.answer = answer
    await server.start()
    stack.servers.append(server)
    return server


async def test_external_servers_need_no_controller_and_get_no_secret(stack: Stack) -> None:
    server = await external(stack, {"id": "alpha", "max_model_len": 512}, {"id": "sql", "parent": "alpha"})
    unused = stack.admin_socket.getsockname()[1]
    stack.models = [
        {"name": "alpha", "engine": "external", "urls": [f"{server.url}/v1", f"http://127.0.0.2:{unused}"]}
    ]
    await stack.start_worker()
    assert (await stack.admin.get("/readyz")).status_code == 200
    answer = await stack.chat()
    assert answer.json()["model"] == "theirs"
    label = answer.headers["x-tidegate-replica"]
    assert str(server.port) not in label, "a client learns no address"
    replicas = (await stack.admin.get("/admin/fleet")).json()["replicas"]
    assert [each["id"] for each in replicas if each["label"] == label] == [f"127.0.0.1:{server.port}"]
    assert not any({"x-tidegate-secret", "authorization"} & hit.headers.keys() for hit in server.hits)
    cards = (await stack.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("alpha", 512), ("sql", 512)]


@pytest.mark.parametrize("adapters", [True, False])
async def test_an_external_server_with_adapters_is_asked_for_no_prompt_logprobs(
    stack: Stack, adapters: bool
) -> None:
    server = await external(stack, {"id": "alpha"}, *[{"id": "sql", "parent": "alpha"}] * adapters)
    stack.models = [{"name": "alpha", "engine": "external", "urls": [f"{server.url}/v1"]}]
    await stack.start_worker()
    body = {"model": "alpha", "prompt": "a", "echo": True}
    assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
    answer = await stack.http.post("/v1/completions", json={**body, "logprobs": 1})
    assert answer.status_code == (400 if adapters else 200)
    assert not adapters or answer.json()["error"]["param"] == "echo"
    assert [hit.json.get("logprobs") for hit in server.hits if hit.path == "/v1/completions"] == (
        [None] if adapters else [None, 1]
    )


async def test_an_external_server_has_its_own_key_certificate_and_model_name(stack: Stack) -> None:
    certificate, key = stack.root / "ca.pem", stack.root / "key"
    key.write_text("sk-1")
    server = await external(
        stack, {"id": "theirs"}, {"id": "sql", "parent": "theirs"}, tls=certify(certificate)
    )
    entry = {"url": server.url, "model": "theirs", "key_file": str(key), "ca_file": str(certificate)}
    stack.models = [{"name": "alpha", "engine": "external", "urls": [entry]}]
    await stack.start_worker()
    await until(lambda: stack.admits({f"127.0.0.1:{server.port}"}), "it is known")
    assert (await stack.chat()).content == ANSWER
    assert (await stack.chat(stream=True)).content == STREAM
    assert (await stack.chat(model="sql")).json()["model"] == "theirs"
    asked = [hit for hit in server.hits if hit.path == "/v1/chat/completions"]
    assert [hit.json["model"] for hit in asked] == ["theirs", "theirs", "sql"]
    assert {hit.headers["authorization"] for hit in server.hits} == {"Bearer sk-1"}
    (stack.root / "new").write_text("sk-2")
    (stack.root / "new").replace(key)

    async def has_new_key() -> bool:
        await stack.chat()
        chats = [hit for hit in server.hits if hit.path == "/v1/chat/completions"]
        return chats[-1].headers["authorization"] == "Bearer sk-2"

    await until(has_new_key, "the new key is sent")


async def test_a_fleet_that_is_not_valid_utf8_is_ignored(stack: Stack) -> None:
    await started(stack)
    stack.controller.models = [{"name": "\udcff", "runner": "generate", "engine": "sim"}]
    stack.controller.set()
    assert stack.workers[0].stderr is not None
    while b"fleet_line_unreadable" not in (line := await stack.workers[0].stderr.readline()):
        assert b"library" not in line
    assert (await stack.chat()).status_code == 200
