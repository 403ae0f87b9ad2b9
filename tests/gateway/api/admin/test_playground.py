"""The playground's answers: those of the pipeline, message by message, until the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from gateway.api.application import admin_app
from policy.config.deployment import GatewayConfig

TOKEN = {"authorization": "Bearer token"}


class Pipeline:
    """A pipeline that answers in parts, as fast as it can."""

    def __init__(self) -> None:
        self.asked = b""
        self.headers: dict[bytes, bytes] = {}
        self.hangs = False
        self.cancelled = False

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = dict(scope["headers"])
        self.asked = (await receive())["body"]
        put: Callable[[Any], Any] = send
        headers = [(b"x-tidegate-explain", b"{}"), (b"x-request-id", b"inner")]
        put({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b"one ", b"two "):
            put({"type": "http.response.body", "body": part, "more_body": True})
        try:
            if self.hangs:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        put({"type": "http.response.body", "body": b"three", "more_body": False})


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


@pytest.fixture
def app(pipeline: Pipeline) -> Any:
    services: Any = SimpleNamespace(chat=pipeline.chat, access=SimpleNamespace(on=False))
    return admin_app(services, lambda: "token", GatewayConfig)


async def test_an_answer_is_passed_on_with_its_route_and_one_id(app: Any, pipeline: Pipeline) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        refused = await client.post("/admin/playground", content=b"{}")
        assert (refused.status_code, pipeline.asked) == (401, b"")
        answer = await client.post("/admin/playground", content=b'{"model": "m"}', headers=TOKEN)
    assert (answer.status_code, answer.text, pipeline.asked) == (200, "one two three", b'{"model": "m"}')
    assert pipeline.headers[b"x-tidegate-explain"] == b"1"
    assert b"authorization" not in pipeline.headers
    assert answer.headers["x-tidegate-explain"] == "{}"
    assert [value for name, value in answer.headers.multi_items() if name == "x-request-id"] != ["inner"]


async def test_a_client_that_leaves_ends_the_request(app: Any, pipeline: Pipeline) -> None:
    pipeline.hangs = True
    sent: list[Any] = []
    seen = asyncio.Event()
    messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

    async def receive() -> Any:
        if (message := next(messages, None)) is not None:
            return message
        await seen.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            seen.set()

    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer token")]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/admin/playground",
        "query_string": b"", "root_path": "", "headers": headers,
    }  # fmt: skip
    await app(scope, receive, send)
    assert [message.get("body") for message in sent[1:]] == [b"one ", b"two "]
    assert pipeline.cancelled
