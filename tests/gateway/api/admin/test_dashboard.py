"""The live state on the admin port: once as JSON, as server-sent events, and without a controller."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from gateway.api.admin import dashboard
from gateway.api.application import admin_app
from gateway.protocol.errors import Refused
from policy.config.deployment import GatewayConfig
from policy.errors import Refusal

TOKEN = {"authorization": "Bearer token"}


class Controller:
    """A controller that answers, or does not."""

    def __init__(self) -> None:
        self.answers = True
        self.asked: list[tuple[str, str]] = []
        self.within_s = 0.0

    async def ask(self, method: str, path: str, body: bytes = b"", *, within_s: float) -> bytes:
        self.asked.append((method, path))
        self.within_s = within_s
        if not self.answers:
            raise Refused(Refusal.NO_REPLICA, "No answer.", code="controller_unreachable")
        return b'{"at": 5.0}'


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def app(controller: Controller) -> Any:
    services: Any = SimpleNamespace(
        controller=controller,
        fleet=SimpleNamespace(describe=lambda: {"source": "controller"}),
        tenants=SimpleNamespace(describe=AsyncMock(return_value=[{"name": "web"}])),
        routers=SimpleNamespace(describe=lambda count: [{"at": count}]),
        access=SimpleNamespace(on=False),
    )
    return admin_app(services, lambda: "token", GatewayConfig)


async def ask(app: Any, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.get("/admin/live", headers={**TOKEN, **headers})


async def test_the_state_is_the_controllers_and_what_the_worker_knows(
    app: Any, controller: Controller
) -> None:
    state = (await ask(app)).json()
    assert (state["controller"], state["problem"]) == ({"at": 5.0}, None)
    assert (state["fleet"], state["tenants"]) == ({"source": "controller"}, [{"name": "web"}])
    assert controller.asked == [("GET", "/live")]
    # The page gives up after SILENT_MS: controllers that are silent are found out before.
    script = (Path(dashboard.__file__).parents[1] / "page" / "app.js").read_text()
    (silent_ms,) = re.findall(r"SILENT_MS = (\d+);", script)
    assert controller.within_s + dashboard.EVERY_S < float(silent_ms) / 1000


async def test_without_a_controller_there_are_the_routes_of_this_worker(
    app: Any, controller: Controller
) -> None:
    controller.answers = False
    state = (await ask(app)).json()
    assert state["controller"] is None
    assert state["problem"] == {"code": "controller_unreachable", "message": "No answer."}
    assert state["routes"] == [{"at": dashboard.MAX_ROUTES}]


async def test_events_go_on_until_the_client_leaves(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "EVERY_S", 0.0)
    sent: list[Any] = []
    enough = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 2:
            enough.set()

    headers = {**TOKEN, "accept": "text/event-stream", "host": "localhost"}
    scope = {
        "type": "http", "http_version": "1.1", "method": "GET", "path": "/admin/live", "query_string": b"",
        "root_path": "", "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    start, first, *_ = sent
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert first["body"].startswith(b"event: live\ndata: ")
    assert first["body"].endswith(b"\n\n")
    assert json.loads(first["body"].split(b"data: ")[1])["controller"] == {"at": 5.0}
