"""`/docs` of both ports works without the internet: page and files come from the port itself."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.api.application import admin_app, client_app
from policy.config.deployment import GatewayConfig

PATHS = {"client": "/v1/chat/completions", "admin": "/admin/fleet"}


@pytest_asyncio.fixture(params=PATHS)
async def port(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    """The name of a port and its client, without a key or token."""
    services: Any = SimpleNamespace(access=SimpleNamespace(on=False))
    unused: Any = SimpleNamespace()
    apps: Any = {
        "client": lambda: client_app(services, lambda *asgi: unused),
        "admin": lambda: admin_app(services, lambda: "token", GatewayConfig),
    }
    transport = httpx.ASGITransport(apps[request.param]())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield request.param, client


async def test_docs_load_nothing_from_other_hosts(port: tuple[str, httpx.AsyncClient]) -> None:
    name, client = port
    page = await client.get("/docs")
    # Whatever a script of the page tries.
    assert page.headers["content-security-policy"] == "default-src 'self' 'unsafe-inline' data:"
    assert not re.search(r"//[\w.]", page.text)
    assert '"validatorUrl": null' in page.text
    links = re.findall(r"""(?:src|href|url)[=:]\s?["']([^"']+)["']""", page.text)
    assert sorted(links) == [
        "docs/favicon.png", "docs/swagger-ui-bundle.js", "docs/swagger-ui.css", "openapi.json"
    ]  # fmt: skip
    for link in links:
        answer = await client.get(f"/{link}")
        assert (answer.status_code, len(answer.content) > 4096) == (200, True)
    style = (await client.get("/docs/swagger-ui.css")).text
    assert not re.search(r"@import|url\((?!['\"]?data:)", style)
    assert PATHS[name] in (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize("file", ["redoc.standalone.js", "..%2Fcore.py", "oauth2-redirect"])
async def test_docs_serve_only_the_pages_files(port: tuple[str, httpx.AsyncClient], file: str) -> None:
    assert (await port[1].get(f"/docs/{file}")).status_code == 404
