"""Answers of the admin port that have no end: they end when their key or token is no longer valid."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gateway.api.admin import dashboard
from gateway.api.application import admin_app
from gateway.intake.admin_keys import AdminKeys
from policy.config.deployment import GatewayConfig
from policy.wire.access_snapshot import AdminKeyRow
from policy.wire.accounting_api import AdminRole
from store.state_dir import StateDir

KEY = "ta-key"
ROW = AdminKeyRow(
    id="admin-1", name="oncall", sha256=hashlib.sha256(KEY.encode()).hexdigest(), role=AdminRole.VIEWER,
    expires=10.0,
)  # fmt: skip
PATHS = ("/admin/capture", "/admin/live")
# A client that is sent this many parts leaves.
ENOUGH = 4


class Port:
    """An admin port; ``change`` happens while the second part of an answer is made."""

    def __init__(self, root: Path) -> None:
        self.state = StateDir(root)
        self.now = 0.0
        self.keys = AdminKeys(lambda: self.now)
        self.keys.take([ROW])
        self.change: Callable[[Port], None] = revoke
        self.captures = self.made = 0
        services: Any = SimpleNamespace(
            admin_keys=self.keys,
            capture=self.capture,
            controller=SimpleNamespace(ask=AsyncMock(return_value=b"{}")),
            fleet=SimpleNamespace(describe=dict),
            tenants=SimpleNamespace(describe=self.part),
            access=SimpleNamespace(on=False),
        )
        self.app = admin_app(services, self.state.admin_token, GatewayConfig)

    async def part(self) -> str:
        self.made += 1
        if self.made == 2:
            self.change(self)
        return "part"

    async def capture(self) -> AsyncGenerator[bytes, None]:
        self.captures += 1
        try:
            while True:
                yield (await self.part()).encode()
        finally:
            self.captures -= 1

    async def parts(self, path: str, key: str) -> int:
        """How many parts a client is sent."""
        sent, enough = 0, asyncio.Event()

        async def receive() -> dict[str, Any]:
            await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal sent
            sent += b"part" in message.get("body", b"")
            if sent == ENOUGH:
                enough.set()
            await asyncio.sleep(0)

        headers = {"authorization": f"Bearer {key}", "accept": "text/event-stream", "host": "localhost"}
        scope = {
            "type": "http", "http_version": "1.1", "method": "GET", "path": path, "query_string": b"",
            "root_path": "", "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        await self.app(scope, receive, send)
        return sent


def revoke(port: Port) -> None:
    port.keys.take([])


def expire(port: Port) -> None:
    port.now = 10.0


def replace_token(port: Port) -> None:
    port.state.admin_token_path.unlink()


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Port:
    monkeypatch.setattr(dashboard, "EVERY_S", 0.0)
    return Port(tmp_path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("change", [revoke, expire])
async def test_an_answer_ends_when_its_key_is_no_longer_valid(
    port: Port, path: str, change: Callable[[Port], None]
) -> None:
    port.change = change
    assert await port.parts(path, KEY) == 1
    assert port.captures == 0


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_ends_when_the_token_is_replaced(port: Port, path: str) -> None:
    port.change = replace_token
    assert await port.parts(path, port.state.admin_token()) == 1
    assert port.captures == 0


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_goes_on_while_its_own_key_or_token_is_valid(port: Port, path: str) -> None:
    port.change = replace_token
    assert await port.parts(path, KEY) >= ENOUGH
    port.change, port.made = revoke, 0
    assert await port.parts(path, port.state.admin_token()) >= ENOUGH
