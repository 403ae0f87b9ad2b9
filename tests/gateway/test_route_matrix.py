"""A tenant's key opens the API and nothing else, in any spelling: nothing of it reaches a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from gateway.api.application import admin_app
from gateway.protocol.paths import ROUTES
from policy.config.deployment import GatewayConfig
from tests.gateway.http.test_server import answers
from tests.gateway.test_access import CHAT, WEB, bearer, tenant
from tests.gateway.worker import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

# What vLLM and Ray serve beside the API.
VLLM = """
/abort_requests /classify /collective_rpc /fault_tolerance/apply /fault_tolerance/status
/finish_weight_update /generative_scoring /get_world_size /inference/v1/generate
/init_weight_transfer_engine /invocations /is_paused /is_scaling_elastic_ep /is_sleeping
/kv_event_sources /load /pause /release_kv_cache_memory /reset_encoder_cache /reset_mm_cache
/reset_prefix_cache /resume /scale_elastic_ep /server_info /sleep /start_profile /stop_profile
/start_weight_update /tokenizer_info /update_weight_version /update_weights /v1/audio/transcriptions
/v1/audio/translations /v1/chat/completions/batch /v1/chat/completions/render /v1/completions/render
/v1/load_lora_adapter /v1/unload_lora_adapter /v1/responses/1 /v1/responses/1/cancel /v1/systemone
/version /wake_up /weight_checker /weight_info /metrics /internal/load /internal/profile
/fleet/stream /signals /replicas
""".split()  # noqa: SIM905 - a list of these would be a screen long
RAY = """
/api/serve/applications/ /api/version /api/jobs/ /api/cluster_status /api/gcs_healthz /api/v0/actors
/nodes /logs /api/component_activities /api/local_raylet_healthz /-/routes /-/healthz /timezone
/worker/traceback
""".split()  # noqa: SIM905 - a list of these would be a screen long
PAGES = ["/livez", "/readyz", "/page/app.js", "/docs/../admin/fleet", "/openapi.json/../admin/fleet"]
# What looks like a key or a name, and ends a string of SQL.
SQL = ["' OR '1'='1", "' OR 1=1 --", "x'; DROP TABLE api_keys; --", '" UNION SELECT sha256 FROM api_keys --']


def admin_routes() -> list[tuple[str, str]]:
    """Method and path of each route of the admin port with a token."""
    unused: Any = SimpleNamespace()
    paths = admin_app(unused, str, GatewayConfig).openapi()["paths"]
    return [
        (method.upper(), path.replace("{", "").replace("}", ""))
        for path, methods in paths.items()
        for method in methods
        if path.startswith("/admin/")
    ]


def spellings(path: str) -> Iterator[str]:
    yield from (
        path,
        f"{path}/",
        f"/{path}",
        f"{path}.",
        f"{path}?x=1",
        f"{path};x",
        f"/.{path}",
        f"/v1/..{path}",
    )
    yield from (
        path.upper(),
        path.replace("/", "//"),
        "/" + path[1:].replace("/", "%2f"),
        f"/%2e%2e{path}",
        f"{path}%00",
    )
    yield from (
        f"/v1/models{path}",
        f"/v1{path}",
        f"http://127.0.0.1:8081{path}",
        f"/v1/chat/completions/..{path}",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("routes"))
    stack.tenants = [tenant("web", WEB)]
    await stack.start_controller()
    await stack.start_worker()
    yield stack
    await stack.close()


async def statuses(stack: Stack, requests: list[tuple[str, str]]) -> list[int]:
    """The statuses of requests that are written byte for byte, on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.client_socket.getsockname()[1])
    head = f"host: x\r\nauthorization: Bearer {WEB}\r\ncontent-length: 2\r\n"
    for i, (method, target) in enumerate(requests):
        close = "connection: close\r\n" if i + 1 == len(requests) else ""
        writer.write(f"{method} {target} HTTP/1.1\r\n{head}{close}\r\n{{}}".encode())
    answered = answers(await reader.read())
    writer.close()
    return [status for status, _, _ in answered]


async def test_a_tenants_key_reaches_no_route_of_engines_ray_or_operators(guarded: Stack) -> None:
    replica = await guarded.serve("one")
    known = {*ROUTES, "/v1/models", "/health", "/ping", "/docs", "/openapi.json"}
    requests = [
        (method, target)
        for path in [*VLLM, *RAY, *PAGES, *dict.fromkeys(path for _, path in admin_routes())]
        if path not in known
        for target in spellings(path)
        for method in ("GET", "POST")
    ]
    found = await statuses(guarded, requests)
    assert len(found) == len(requests) > 3000
    opened = [each for each in zip(requests, found, strict=True) if each[1] not in (401, 403, 404, 405)]
    assert opened == []
    assert replica.hits == []


async def test_a_tenants_key_opens_nothing_of_the_admin_port(guarded: Stack) -> None:
    asked = guarded.controller.asked.copy()
    for method, path in admin_routes():
        answer = await guarded.admin.request(method, path, headers=bearer(WEB), json={})
        assert answer.status_code == 401, (method, path)
    assert guarded.controller.asked == asked


async def test_sql_in_keys_and_names_is_an_unknown_name(guarded: Stack) -> None:
    replica = await guarded.serve("one")
    for text in SQL:
        for headers in (bearer(text), {"x-api-key": text}):
            answer = await guarded.http.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        for model in (text, f"alpha:{text}"):
            answer = await guarded.http.post(
                "/v1/chat/completions", json={**CHAT, "model": model}, headers=bearer(WEB)
            )
            assert answer.status_code == 404
        assert (await guarded.http.get(f"/v1/models/{text}", headers=bearer(WEB))).status_code == 404
    assert replica.hits == []
