"""Adapter operations of the admin port: requests to the controller, and how its answers are passed on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.api.application import admin_app
from gateway.api.controller_proxy import ControllerProxy
from gateway.protocol.errors import Refused
from policy.config.deployment import Cluster, Deployment, GatewayConfig, ModelSpec
from policy.errors import ConfigError
from policy.types import EngineKind
from policy.wire.accounting_api import AdminRole, AuditActor
from policy.wire.controller import problem_of
from tests.gateway.fake_replica import SECRET, Exchange, FakeController

NDJSON = {"accept": "application/x-ndjson"}
ADD = {"model": None, "name": "sql", "source": "/adapters/sql", "tenants": []}


class Site:
    """The admin app over a fake controller."""

    def __init__(self, controller: FakeController) -> None:
        self.controller = controller
        self.deployment = Deployment(
            models=(ModelSpec(name="alpha"),), cluster=Cluster(controller=f"127.0.0.1:{controller.port}")
        )
        services: Any = SimpleNamespace(
            controller=ControllerProxy(SECRET, lambda: self.deployment), access=SimpleNamespace(on=False)
        )
        app = admin_app(services, lambda: "token", GatewayConfig)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://localhost",
            headers={"authorization": "Bearer token"},
        )

    def reply(self, value: Any, *, status: int = 200) -> None:
        async def answer(exchange: Exchange) -> None:
            await exchange.reply(json.dumps(value).encode(), status=status)

        self.controller.answer = answer

    def stream(self, *lines: dict[str, Any], whole: bool = True) -> None:
        async def answer(exchange: Exchange) -> None:
            await exchange.head("application/x-ndjson")
            for line in lines:
                await exchange.chunk(json.dumps(line).encode() + b"\n")
            if whole:
                await exchange.end()
            else:
                exchange.reset()

        self.controller.answer = answer


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    controller = FakeController()
    await controller.start()
    site = Site(controller)
    yield site
    await site.http.aclose()
    await controller.stop()


@pytest.mark.parametrize(
    ("method", "path", "body", "asked"),
    [
        ("GET", "/admin/adapters", None, "/adapters"),
        ("DELETE", "/admin/adapters/alpha/sql", None, "/adapters/alpha/sql"),
        ("DELETE", "/admin/adapters/org/beta/sql", None, "/adapters/org%2Fbeta/sql"),
        ("POST", "/admin/adapters/alpha/sql/rollback", None, "/adapters/alpha/sql/rollback"),
        ("POST", "/admin/adapters/alpha/sql/rollback", {"to": "v1"}, "/adapters/alpha/sql/rollback"),
        ("POST", "/admin/adapters/org/beta/sql/split", {"v1": 95, "v2": 5}, "/adapters/org%2Fbeta/sql/split"),
        ("DELETE", "/admin/adapters/alpha/..%2F..%2Fx", None, "/adapters/alpha%2F..%2F../x"),
        ("POST", "/admin/scale", {"model": "alpha", "replicas": 2}, "/scale"),
        ("POST", "/admin/mode", {"model": "alpha", "mode": "auto"}, "/mode"),
        ("GET", "/admin/history", None, "/history?step_s=0.0"),
        (
            "GET",
            "/admin/history?model=org/beta&since=1.5&step_s=60",
            None,
            "/history?model=org%2Fbeta&since=1.5&step_s=60.0",
        ),
        ("GET", "/admin/decisions", None, "/decisions"),
        ("GET", "/admin/decisions?last=3", None, "/decisions?last=3"),
        ("GET", "/admin/decisions?model=org/beta&at=1.5", None, "/decisions?model=org%2Fbeta&at=1.5"),
        ("GET", "/admin/decisions?model=a%26last%3D9", None, "/decisions?model=a%26last%3D9"),
    ],
)
async def test_operations_are_forwarded(site: Site, method: str, path: str, body: Any, asked: str) -> None:
    site.reply({"name": "sql"})
    answer = await site.http.request(method, path, json=body)
    assert (answer.status_code, answer.json()) == (200, {"name": "sql"})
    (seen,) = site.controller.asked
    assert (seen.method, seen.path) == (method, asked)
    if body is not None:
        assert seen.json == body


async def test_of_several_controllers_the_one_that_leads_is_asked(site: Site) -> None:
    stands_by = FakeController()
    await stands_by.start()

    async def refuse(exchange: Exchange) -> None:
        error = {"error": {"type": "NotLeader", "message": "stands by"}}
        await exchange.reply(json.dumps(error).encode(), status=503)

    stands_by.answer = refuse
    addresses = f"127.0.0.1:9,127.0.0.1:{stands_by.port},127.0.0.1:{site.controller.port}"
    site.deployment = replace(site.deployment, cluster=Cluster(controller=addresses))
    site.reply({"name": "sql"})
    for method, path in (("DELETE", "/admin/adapters/alpha/sql"), ("GET", "/admin/decisions")):
        assert (await site.http.request(method, path)).status_code == 200
    # It is asked first from then on.
    assert len(stands_by.asked) == 1
    site.stream({"step": "check"}, {"alias": {"name": "sql"}})
    assert (await site.http.post("/admin/adapters", json=ADD, headers=NDJSON)).status_code == 200
    site.controller.answer = refuse
    answer = await site.http.get("/admin/decisions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "controller_unreachable")
    await stands_by.stop()


class LostHosts:
    """Controllers of which ``a`` and ``b`` do not answer, and ``c`` leads."""

    def __init__(self, lost: type[httpx.TransportError]) -> None:
        self.lost, self.asked = lost, list[str]()
        deployment = Deployment(models=(ModelSpec(name="alpha"),), cluster=Cluster(controller="a:1,b:1,c:1"))
        transport = httpx.MockTransport(self._answer)
        self.proxy = ControllerProxy(SECRET, lambda: deployment, transport)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        if request.url.host != "c":
            raise self.lost("lost", request=request)
        return httpx.Response(200, content=b'{"alias": {}}\n')

    async def change(self) -> None:
        await self.proxy.ask("POST", "/scale", b"{}")

    async def look(self) -> None:
        await self.proxy.ask("GET", "/live")

    async def add(self) -> None:
        actor = AuditActor("test", AdminRole.ADMIN)
        assert [line async for line in self.proxy.lines("/adapters", b"{}", "alias", actor=actor)]


@pytest.mark.parametrize("lost", [httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadTimeout])
@pytest.mark.parametrize("operation", [LostHosts.look, LostHosts.add])
async def test_the_next_controller_is_asked_when_a_host_is_lost_or_hangs(
    lost: type[httpx.TransportError], operation: Callable[[LostHosts], Awaitable[None]]
) -> None:
    hosts = LostHosts(lost)
    await operation(hosts)
    assert hosts.asked[:3] == ["a", "b", "c"]
    await hosts.look()
    assert set(hosts.asked[3:]) == {"c"}


async def test_a_change_goes_to_one_controller_unless_it_cannot_have_been_received() -> None:
    hosts = LostHosts(httpx.ConnectTimeout)
    await hosts.change()
    assert hosts.asked == ["a", "b", "c"]
    hosts = LostHosts(httpx.ReadTimeout)
    for asked in (["a"], ["a", "b"]):
        with pytest.raises(Refused, match="may still be carried out"):
            await hosts.change()
        assert hosts.asked == asked
    await hosts.change()
    assert hosts.asked == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("kind", "code", "status", "expected"),
    [
        ("AdapterRefused", "rank", 400, (400, "rank")),
        ("AdapterUnknown", "", 404, (404, "adapter_not_found")),
        ("TargetError", "", 409, (409, "not_allowed")),
        ("TargetError", "no_former", 409, (409, "no_former")),
        ("ConfigError", "", 409, (400, "bad_value")),
        ("BadRequest", "", 400, (400, "bad_request")),
        ("Unauthorized", "", 401, (502, "controller_failed")),
        ("Unreachable", "", 409, (503, "unreachable")),
        ("PreconditionFailed", "", 409, (503, "precondition_failed")),
        ("Surprise", "", 500, (502, "controller_failed")),
        ("TidegateError", "", 409, (502, "controller_failed")),
    ],
)
async def test_errors_are_in_our_envelope_with_a_stable_code(
    site: Site, kind: str, code: str, status: int, expected: tuple[int, str]
) -> None:
    problem = {"type": kind, "message": "It is so.", **({"code": code} if code else {})}
    site.reply({"error": problem}, status=status)
    for answer in (
        await site.http.get("/admin/adapters"),
        await site.http.post("/admin/adapters", json=ADD),
        await site.http.post("/admin/adapters", json=ADD, headers=NDJSON),
        await site.http.delete("/admin/adapters/alpha/sql"),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == expected
        assert (error["message"], error["param"]) == ("It is so.", None)
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("whole", [True, False])
async def test_an_error_names_the_parameter(site: Site, *, whole: bool) -> None:
    problem = problem_of(ConfigError("split", {"v1": -1.0}, "at least one weight above 0"))
    if whole:
        site.reply({"error": problem}, status=409)
    else:
        site.stream({"step": "check"}, {"error": problem})
    answer = await site.http.post("/admin/adapters", json=ADD)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "split: got {'v1': -1.0}, expected at least one weight above 0",
        "type": "invalid_request_error",
        "param": "split",
        "code": "bad_value",
    }


@pytest.mark.parametrize(
    ("method", "path", "expected", "allowed"),
    [
        ("GET", "/admin/nothing", (404, "not_found"), None),
        ("DELETE", "/admin/adapters/alpha", (404, "not_found"), None),
        ("PUT", "/admin/adapters", (405, "method_not_allowed"), "GET, HEAD, POST"),
        ("POST", "/admin/adapters/alpha/sql", (405, "method_not_allowed"), "DELETE"),
    ],
)
async def test_unknown_paths_and_methods_have_our_envelope(
    site: Site, method: str, path: str, expected: tuple[int, str], allowed: str | None
) -> None:
    answer = await site.http.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == expected
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    assert answer.headers.get("allow") == allowed
    assert site.controller.asked == []


@pytest.mark.parametrize(
    ("path", "query"),
    [
        *(("routes", query) for query in ("limit=0", "limit=many")),
        *(
            ("decisions", query)
            for query in ("last=0", "last=many", "last=1001", "at=nan", "at=-1", "at=noon")
        ),
    ],
)
async def test_a_bad_query_parameter_is_in_our_envelope(site: Site, path: str, query: str) -> None:
    answer = await site.http.get(f"/admin/{path}?{query}")
    error = answer.json()["error"]
    name, _, value = query.partition("=")
    assert (answer.status_code, error["param"], error["code"]) == (400, name, "bad_value")
    assert error["message"].startswith(f"{name}: got '{value}'; ")
    assert site.controller.asked == []


async def test_an_undecodable_error_of_the_controller_is_a_502(site: Site) -> None:
    site.reply("Not Found", status=404)
    answer = await site.http.get("/admin/adapters")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "controller_failed")


async def test_an_add_streams_its_progress_if_requested(site: Site) -> None:
    lines = [
        {"step": "fetch", "done": 1, "total": 2},
        {"step": "check", "done": 2},
        {"alias": {"name": "sql"}},
    ]
    site.stream(*lines)
    answer = await site.http.post("/admin/adapters", json=ADD, headers=NDJSON)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line) for line in answer.text.splitlines()] == lines
    assert site.controller.asked[0].json == ADD

    answer = await site.http.post("/admin/adapters", json=ADD)
    assert (answer.status_code, answer.json()) == (200, lines[-1])


@pytest.mark.parametrize("headers", [{}, NDJSON])
@pytest.mark.parametrize("whole", [True, False], ids=["without an end", "broken"])
async def test_a_lost_controller_is_reported(site: Site, headers: dict[str, str], *, whole: bool) -> None:
    site.stream({"step": "fetch"}, whole=whole)
    answer = await site.http.post("/admin/adapters", json=ADD, headers=headers)
    last = json.loads(answer.text.splitlines()[-1])
    assert last["error"]["code"] == "controller_unreachable"
    assert answer.status_code == (200 if headers else 503)


async def test_only_a_newline_ends_a_line(site: Site) -> None:
    final = {"alias": {"name": "sql"}, "message": "one\u2028line \x85 it is"}

    async def answer(exchange: Exchange) -> None:
        await exchange.head("application/x-ndjson")
        for byte in json.dumps(final, ensure_ascii=False).encode() + b"\n":
            await exchange.chunk(bytes([byte]))
        await exchange.end()

    site.controller.answer = answer
    assert (await site.http.post("/admin/adapters", json=ADD)).json() == final


async def test_an_unreachable_controller_is_a_503(site: Site) -> None:
    await site.controller.stop()
    answer = await site.http.get("/admin/adapters")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "controller_unreachable")
    assert int(answer.headers["retry-after"]) > 0
    await site.controller.start()


async def test_operations_without_a_controller_are_409(site: Site) -> None:
    site.deployment = Deployment(
        models=(ModelSpec(name="theirs", engine=EngineKind.EXTERNAL, urls=("http://t:1",)),)
    )
    for answer in (
        await site.http.get("/admin/adapters"),
        await site.http.post("/admin/adapters", json=ADD),
        await site.http.delete("/admin/adapters/theirs/sql"),
        await site.http.post("/admin/adapters/theirs/sql/rollback"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_controller")
    assert site.controller.asked == []


async def test_a_web_page_reaches_no_operation(site: Site) -> None:
    """What a page can send without asking: a form or text, from its own site, by any name."""
    for origin, host in (("http://evil.example", "localhost"), ("http://evil.example", "evil.example")):
        site.http.headers = httpx.Headers({"origin": origin, "host": host, "content-type": "text/plain"})
        for source in ("http://169.254.169.254/", "/etc"):
            answer = await site.http.post("/admin/adapters", content=json.dumps({**ADD, "source": source}))
            assert answer.status_code == 403
    assert site.controller.asked == []
