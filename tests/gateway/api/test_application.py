"""The FastAPI application: hot paths, an allowlist of others, errors in two envelopes, docs offline."""

from __future__ import annotations

import io
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from gateway.api.application import CLIENT_ROUTERS, client_app
from gateway.intake.authentication import TenantDirectory
from gateway.protocol.paths import ROUTES, ProxyRoute
from gateway.routing.shared_counters import LOCAL
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import Deployment, ModelSpec
from policy.config.tenancy import Tenant
from store.key_derivation import digest_of

KEY, ADMIN_KEY = "key-of-shop", "key-of-boss"
BEARER = {"authorization": f"Bearer {KEY}"}
DOCS = Path(__file__).parents[3] / "docs" / "extending.md"


class Port:
    """A client port whose hot routes answer with their own path."""

    def __init__(self, *more: Any) -> None:
        tenants = TenantDirectory(b"salt", "own", WorkerMetrics().tenants, LOCAL)
        tenants.read(
            Deployment(
                models=(ModelSpec(name="alpha"),),
                tenants=(
                    Tenant(name="shop", keys_sha256=(digest_of(KEY.encode()),)),
                    Tenant(name="boss", keys_sha256=(digest_of(ADMIN_KEY.encode()),), admin=True),
                ),
            )
        )
        models = SimpleNamespace(
            all=AsyncMock(side_effect=lambda caller: b'["%s"]' % caller.account.name.encode()),
            one=lambda name, caller: b"{}" if name == "alpha" else None,
        )
        self.logged = io.StringIO()
        self.reasons: list[str] = []
        services: Any = SimpleNamespace(
            tenants=tenants,
            models=models,
            not_ready=lambda: self.reasons,
            log=StructuredLog(0, self.logged),
            access=SimpleNamespace(on=False),
        )
        self.app = client_app(services, self.serve, (*CLIENT_ROUTERS, *more))
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://client"
        )

    async def serve(self, route: ProxyRoute, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": route.path.encode()})

    async def get(self, path: str, key: str = KEY) -> httpx.Response:
        return await self.http.get(path, headers={"authorization": f"Bearer {key}"} if key else {})


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    port = Port()
    yield port
    await port.http.aclose()


@pytest.mark.parametrize("path", ROUTES)
async def test_a_hot_path_has_the_same_answer_with_and_without_the_router(port: Port, path: str) -> None:
    in_front = await port.http.post(path, content=b"x")
    port.app.hot.clear()
    by_router = await port.http.post(path, content=b"x")
    assert in_front.content == by_router.content == path.encode()


# Of every path the methods that it has; all others are 405, or 404 where it has none.
METHODS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ROUTES, ("POST",)),
    **dict.fromkeys(
        ("/v1/models", "/v1/models/alpha", "/health", "/ping", "/docs", "/docs/swagger-ui.css",
         "/openapi.json"),
        ("GET", "HEAD"),
    ),
    **dict.fromkeys(
        ("/", "/livez", "/readyz", "/metrics", "/admin/fleet", "/admin/adapters", "/redoc", "/v1", "/v1/",
         "/v1/chat/completions/", "/v1/load_lora_adapter", "/tokenize", "/internal/load", "//v1/models",
         "/version", "/docs/", "/health/", "/v1/messages/", "/v1/messages/batches",
         "/v1/messages/count_tokens/", "/v1/messagesx"),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", METHODS)
async def test_every_path_has_its_methods_and_its_envelope(port: Port, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY"):
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
        answer = await port.http.request(method, "http://client" + path, headers=headers)
        allowed = METHODS[path]
        assert answer.status_code == (200 if method in allowed else 405 if allowed else 404), method
        assert answer.headers.get_list("x-request-id") == (
            [] if method == "POST" and path in ROUTES else ["mine"]
        )
        assert answer.headers.get("allow") == (None if method in allowed else ", ".join(allowed) or None)
        if method == "HEAD":
            assert answer.content == b""
        elif method not in allowed:
            anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
            assert set(answer.json()) == ({"type", "error"} if anthropic else {"error"})
            assert answer.headers.get("request-id") == ("mine" if anthropic else None)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == ("method_not_allowed" if allowed else "not_found")
            kind = "not_found_error" if anthropic and not allowed else "invalid_request_error"
            assert error["type"] == kind


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), "https://app.example", None),
        (("https://app.example",), "https://app.example", "https://app.example"),
        (("https://app.example",), "https://evil.example", None),
        (("https://app.example",), None, None),
        (("*",), "https://any.example", "*"),
    ],
)
async def test_pages_of_allowed_origins_may_use_the_port(
    port: Port, origins: tuple[str, ...], origin: str | None, allowed: str | None
) -> None:
    port.app.allow_origins(origins)
    headers = {"origin": origin} if origin else {}
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for path in ("/v1/chat/completions", "/v1/models", "/nothing"):
        preflight = await port.http.options(path, headers=headers | wanted)
        assert preflight.headers.get("access-control-allow-origin") == allowed
        assert (preflight.status_code == 200) == bool(allowed)
        assert preflight.headers.get("access-control-allow-headers") == (
            "authorization" if origins and origin else None
        )
        for method in ("POST", "GET"):  # answers and errors alike
            answer = await port.http.request(method, path, headers=headers)
            assert answer.headers.get("access-control-allow-origin") == allowed
            exposed = answer.headers.get("access-control-expose-headers", "").split(", ")
            for name in ("x-request-id", "x-ratelimit-remaining-tokens"):
                assert (name in exposed) == bool(origins and origin)
            assert answer.headers.get("vary") == ("Origin" if origins else None)


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_is_that_of_the_gateway_and_needs_no_key(port: Port, path: str) -> None:
    answer = await port.get(path, "")
    assert (answer.status_code, answer.content) == (200, b"")
    port.reasons = ["draining"]
    answer = await port.get(path, "")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
    assert answer.headers["retry-after"] == "5"


async def test_the_key_decides_the_tenant(port: Port) -> None:
    assert (await port.get("/v1/models")).json() == ["shop"]
    for key in ("", "wrong"):
        for path in ("/v1/models", "/v1/models/org/alpha"):
            answer = await port.get(path, key)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
    answer = await port.get("/v1/models/org/alpha")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_bug_in_an_endpoint_is_a_500_without_details(port: Port) -> None:
    port.app.state.services.models = None
    answer = await port.http.get("/v1/models/canary-word", headers={"x-request-id": "mine", **BEARER})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "NoneType" not in answer.text
    logged = json.loads(port.logged.getvalue())
    assert (
        logged.items()
        >= {"request_id": "mine", "route": "/v1/models/{name:path}", "error": "AttributeError"}.items()
    )
    assert re.fullmatch(r"gateway\.api\.models_endpoint:\d+ one_model", logged["traceback"][-1])
    assert not re.search(r"canary-word|NoneType|\.py", port.logged.getvalue())


async def test_the_endpoint_example_of_the_documentation() -> None:
    section = DOCS.read_text().partition("## How do I add an endpoint?")[2].partition("\n## ")[0]
    module: dict[str, Any] = {}
    source = section.partition("```python\n")[2].partition("```")[0]
    exec(compile(source, str(DOCS), "exec"), module)  # noqa: S102 - it is ours
    port = Port(module["router"])
    mine = await port.get("/v1/usage")
    assert (mine.status_code, mine.json()) == (
        200,
        {"tenant": "shop", "prompt_tokens": 0, "output_tokens": 0},
    )
    assert [row["name"] for row in (await port.get("/v1/usage/all", ADMIN_KEY)).json()] == ["shop", "boss"]
    for path, key, status in (
        ("/v1/usage", "", 401), ("/v1/usage/all", KEY, 403), ("/v1/usage/all?limit=0", ADMIN_KEY, 400)
    ):  # fmt: skip
        answer = await port.get(path, key)
        assert (answer.status_code, set(answer.json())) == (status, {"error"})
    assert "/v1/usage" in (await port.http.get("/openapi.json")).json()["paths"]
    await port.http.aclose()
