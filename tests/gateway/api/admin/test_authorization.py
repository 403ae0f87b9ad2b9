"""The admin port: its token, the hosts by which it is called, and what a page of another site can do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gateway.api.application import admin_app
from gateway.intake.admin_keys import AdminKeys
from policy.config.deployment import GatewayConfig
from store.state_dir import StateDir

GATEWAY = GatewayConfig(admin_host="ops.example", admin_allowed_hosts=("Prometheus.example",))
EVERYWHERE = GatewayConfig(admin_host="0.0.0.0")
OPEN = ("/livez", "/readyz", "/metrics", "/docs", "/openapi.json")
GUARDED = ("/admin/fleet", "/admin/tenants", "/admin/adapters", "/admin/capture", "/admin", "/other")


async def scrape(names: tuple[str, ...], *, openmetrics: bool) -> bytes:
    return b"# EOF\n" if openmetrics else b""


class Port:
    def __init__(self, state: StateDir, gateway: GatewayConfig = GATEWAY) -> None:
        self.state = state
        services: Any = SimpleNamespace(
            fleet=SimpleNamespace(describe=dict),
            scraper=SimpleNamespace(scrape=scrape),
            not_ready=list,
            admin_keys=AdminKeys(lambda: 0.0),
            access=SimpleNamespace(on=False),
        )
        self.services = services
        self.app = admin_app(services, state.admin_token, lambda: gateway)

    async def ask(
        self, path: str, *, method: str = "GET", http: str = "http", **headers: str
    ) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app)) as client:
            return await client.request(method, f"{http}://localhost{path}", headers=headers)

    @property
    def bearer(self) -> str:
        return f"Bearer {self.state.admin_token()}"


@pytest.fixture
def port(tmp_path: Path) -> Port:
    return Port(StateDir(tmp_path))


@pytest.mark.parametrize("path", OPEN)
async def test_probes_metrics_and_the_schema_need_no_token(port: Port, path: str) -> None:
    assert (await port.ask(path)).status_code == 200
    head = await port.ask(path, method="HEAD")
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
    ],
)
async def test_the_format_of_metrics_is_negotiated(port: Port, accept: str, kind: str) -> None:
    answer = await port.ask("/metrics", accept=accept)
    assert answer.headers["content-type"] == kind
    assert answer.content == (b"# EOF\n" if "openmetrics" in kind else b"")


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize("given", ["", "Bearer", "Bearer ", "Bearer wrong", "Basic {token}", "{token}"])
async def test_everything_else_is_answered_401_without_the_token(port: Port, path: str, given: str) -> None:
    headers = {"authorization": given.format(token=port.state.admin_token())} if given else {}
    for method in ("GET", "POST", "DELETE"):
        answer = await port.ask(path, method=method, **headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["code"] == "invalid_admin_token"
        assert answer.headers["x-request-id"]


async def test_the_token_is_a_private_file_and_removing_it_makes_a_new_one(port: Port) -> None:
    former = port.bearer
    assert (await port.ask("/admin/fleet", authorization=former)).status_code == 200
    path = port.state.admin_token_path
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() != port.state.secret().encode()
    path.unlink()
    assert (await port.ask("/admin/fleet", authorization=former)).status_code == 401
    assert (await port.ask("/admin/fleet", authorization=port.bearer)).status_code == 200


@pytest.mark.parametrize(
    ("gateway", "host", "status"),
    [
        *((GATEWAY, host, 200) for host in (
            "localhost", "LOCALHOST:1", "127.0.0.1:8081", "127.1.2.3", "[::1]:8081", "ops.example:443",
            "prometheus.example",
        )),
        *((GATEWAY, host, 403) for host in (
            "evil.example", "localhost.evil.example", "evil.example:8081", "10.0.0.1", "[fd00::1]", "",
            ":8081", "localhost:8081@evil.example", "localhost evil.example", "[localhost]", "127.0.0.1:port",
        )),
        (EVERYWHERE, "10.0.0.1:8081", 200), (EVERYWHERE, "[fd00::1]:8081", 200),
        (EVERYWHERE, "pod.example", 403),
    ],
)  # fmt: skip
async def test_a_name_that_is_not_the_ports_own_is_refused(
    tmp_path: Path, gateway: GatewayConfig, host: str, status: int
) -> None:
    port = Port(StateDir(tmp_path), gateway)
    for path in ("/livez", "/metrics", "/admin/fleet"):
        answer = await port.ask(path, host=host, authorization=port.bearer)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "foreign_host"


async def test_a_request_with_two_hosts_or_none_is_refused_but_for_http_1_0(port: Port) -> None:
    async def status(version: str, *hosts: bytes) -> int:
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        scope = {
            "type": "http", "http_version": version, "method": "GET", "path": "/livez", "raw_path": b"/livez",
            "query_string": b"", "root_path": "", "headers": [(b"host", host) for host in hosts],
        }  # fmt: skip
        await port.app(scope, receive, send)
        return statuses[0]

    assert await status("1.1") == 403
    assert await status("1.1", b"localhost", b"evil.example") == 403
    assert await status("1.1", b"evil.example", b"localhost") == 403
    assert await status("1.0") == 200
    assert await status("1.0", b"evil.example") == 403


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8081", "http://localhost:8081", 200),
        ("ops.example", "https://ops.example", 200),
        ("localhost:8081", "http://localhost:3000", 403),
        ("localhost:8081", "http://evil.example", 403),
        ("localhost:8081", "null", 403),
        ("localhost:8081", "http://[abc", 403),
        # A name of another site that resolves to this machine: Origin and Host agree.
        ("evil.example:8081", "http://evil.example:8081", 403),
    ],
)
async def test_a_page_of_another_site_is_refused_even_with_the_token(
    port: Port, host: str, origin: str, status: int
) -> None:
    answer = await port.ask("/admin/fleet", host=host, origin=origin, authorization=port.bearer)
    assert answer.status_code == status


async def test_a_browser_may_not_send_the_token_across_sites(port: Port) -> None:
    """A page needs the preflight's leave for the Authorization header."""
    answer = await port.ask(
        "/admin/adapters", method="OPTIONS", origin="http://evil.example",
        **{"access-control-request-headers": "authorization", "access-control-request-method": "POST"},
    )  # fmt: skip
    assert answer.status_code == 403
    assert not {name for name in answer.headers if name.startswith("access-control-")}
