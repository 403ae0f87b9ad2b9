"""The controller's HTTP API: the secret, the refusals, the stream, and the client that reads them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from policy.errors import ConfigError, SwitchRefused, TargetError, Unreachable
from policy.scaling.decision_types import ModeOverride
from policy.types import FleetSnapshot, Priority, ReplicaPhase
from policy.wire.controller_reports import GatewayReport, WaitingRequests, WorkerDetail
from policy.wire.headers import SECRET_HEADER
from serve.controller import routes
from serve.controller.client import ControllerClient
from serve.controller.live_page_state import WATCHED_S
from serve.controller_api_schema import ControllerStatus, LoggedDecision, ModelStatus
from serve.state import versioned_watch
from tests.serve.plane import Plane
from tests.serve.sim_documents import document
from tests.serve.traffic import Traffic

PATHS = [
    *(
        ("GET", path)
        for path in (
            "/livez",
            "/fleet",
            "/fleet/stream",
            "/status",
            "/gpus",
            "/decisions",
            "/history",
            "/live",
            "/nowhere",
        )
    ),
    *(("POST", path) for path in ("/replicas", "/signals", "/scale", "/mode", "/apply", "/adapters")),
    ("GET", "/adapters/blobs/" + "a" * 64),
    ("DELETE", "/adapters/m/sql"),
]


@pytest.fixture
async def served(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    await plane.ready(document())
    async with plane.client() as client:
        yield client


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("given", [{}, {SECRET_HEADER: "wrong"}])
async def test_every_route_requires_the_secret(
    served: httpx.AsyncClient, method: str, path: str, given: dict[str, str]
) -> None:
    served.headers.pop(SECRET_HEADER)
    answer = await served.request(method, path, headers=given)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "Unauthorized"


async def test_livez_fleet_and_status_return_the_state(plane: Plane, served: httpx.AsyncClient) -> None:
    assert (await served.get("/livez")).json() == {"ok": True}
    fleet = msgspec.json.decode((await served.get("/fleet")).content, type=FleetSnapshot)
    assert fleet == plane.controller.fleet()
    assert [replica.state for replica in fleet.replicas] == [ReplicaPhase.READY]
    status = msgspec.json.decode((await served.get("/status")).content, type=ControllerStatus)
    assert (status.actuator, status.pid, status.models[0].phase) == ("memory", 1, "steady")
    assert status.events


async def test_scale_mode_and_apply_change_the_target(plane: Plane, served: httpx.AsyncClient) -> None:
    answer = await served.post("/scale", json={"model": "m", "replicas": 2})
    assert msgspec.json.decode(answer.content, type=ModelStatus).target == 2
    answer = await served.post("/mode", json={"model": "m", "mode": "single-large"})
    assert msgspec.json.decode(answer.content, type=ModelStatus).shape == "large"
    answer = await served.post("/apply", json=document(gateway={"workers": 3}))
    assert msgspec.json.decode(answer.content, type=ControllerStatus).models[0].generation == 1
    written = plane.state.load(plane.state.deployment_path, dict[str, Any])
    assert written == document(gateway={"workers": 3})


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/scale", {"model": "m", "replicas": 2}),
        ("/mode", {"model": "m", "mode": "multi-replica"}),
        ("/apply", document(gateway={"workers": 3})),
    ],
)
async def test_a_change_waits_until_a_restarted_controller_knows_what_runs(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, path: str, change: dict[str, Any]
) -> None:
    await plane.up(document())
    plane.state.targets_path.unlink()
    plane.replace()
    async with plane.client() as client:
        asked = asyncio.create_task(client.post(path, json=change))
        await asyncio.sleep(0.05)
        assert not asked.done()
        await plane.controller.rebuild()
        assert (await asked).status_code == 200
    monkeypatch.setattr("serve.controller.controller.RESTORED_WITHIN_S", 0.01)
    plane.replace()
    async with plane.client() as client:
        refused = await client.post(path, json=change)
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "Unreachable")


async def test_overrides_expire_and_are_cleared(plane: Plane, served: httpx.AsyncClient) -> None:
    answer = await served.post("/scale", json={"model": "m", "replicas": 2, "for_s": 60})
    status = msgspec.json.decode(answer.content, type=ModelStatus)
    assert status.override == ModeOverride(mode="multi-replica", count=2, until=plane.now + 60)
    assert status.decided_by == "by hand"
    answer = await served.post("/scale", json={"model": "m", "replicas": "auto"})
    assert msgspec.json.decode(answer.content, type=ModelStatus).override is None
    answer = await served.post("/mode", json={"model": "m", "mode": "single-large", "for_s": 5})
    assert msgspec.json.decode(answer.content, type=ModelStatus).override is not None
    answer = await served.post("/mode", json={"model": "m", "mode": "auto"})
    status = msgspec.json.decode(answer.content, type=ModelStatus)
    assert (status.override, status.mode, status.decided_by) == (None, "single-large", "predictive")


async def test_decisions_have_their_situations(plane: Plane, served: httpx.AsyncClient) -> None:
    await Traffic(plane).run(20, m=1.0)
    answer = await served.get("/decisions", params={"model": "m", "last": 2})
    newest, before = msgspec.json.decode(answer.content, type=list[LoggedDecision])
    assert newest.decision.at > before.decision.at
    assert newest.situation.signals.demand is not None
    at = before.decision.at
    answer = await served.get("/decisions", params={"at": at})
    (found,) = msgspec.json.decode(answer.content, type=list[LoggedDecision])
    assert found.decision.at == at
    assert (await served.get("/decisions", params={"model": "none"})).json() == []


async def test_history_has_every_decision_of_the_model(plane: Plane, served: httpx.AsyncClient) -> None:
    await Traffic(plane).run(20, m=1.0)
    (seen,) = (await served.get("/history")).json()
    assert (seen["model"], seen["step_s"]) == ("m", 0.0)
    newest = (await served.get("/decisions", params={"last": 1})).json()[0]["decision"]
    assert seen["at"][-1] == pytest.approx(newest["at"], abs=0.001)
    assert {len(column) for column in (seen["at"], seen["mode"], *seen["columns"].values())} == {
        len(seen["at"])
    }
    query = {"model": "m", "since": seen["at"][-1], "step_s": 60}
    (last,) = (await served.get("/history", params=query)).json()
    assert len(last["at"]) == 1
    assert (await served.get("/history", params={"step_s": -1})).status_code == 400
    assert (await served.get("/history", params={"model": "none"})).json()[0]["at"] == []


async def test_live_has_the_details_of_workers_while_it_is_read(
    plane: Plane, served: httpx.AsyncClient
) -> None:
    await Traffic(plane).run(10, m=1.0)

    async def reported(number: int, worker: str, *, waits: int) -> bool:
        """A worker's report with a detail; returns whether the controller wants one."""
        detail = WorkerDetail(
            routes=({"at": plane.now + waits, "replica": worker},),
            waiting=(WaitingRequests(model="m", priority=Priority.BATCH, tenant="night", requests=waits),),
        )
        report = GatewayReport(worker=worker, number=number, since_s=9.0, detail=detail)
        answer = await served.post("/signals", content=msgspec.json.encode(report))
        return bool(answer.json()["wants_detail"])

    assert not await reported(1, "a", waits=2)
    live = (await served.get("/live")).json()
    assert live["models"][0]["status"]["name"] == "m"
    assert live["models"][0]["signals"]["demand"]["queued"] == 0
    assert [each["id"] for each in live["replicas"]] == [
        each.id for each in plane.controller.fleet().replicas
    ]
    assert await reported(1, "b", waits=3)
    live = (await served.get("/live")).json()
    assert live["waiting"] == [{"model": "m", "priority": "batch", "tenant": "night", "requests": 5}]
    assert [route["replica"] for route in live["routes"]] == ["b", "a"]
    plane.now += WATCHED_S
    assert not await reported(2, "a", waits=1)
    live = (await served.get("/live")).json()
    assert [each["requests"] for each in live["waiting"]] == [1]


@pytest.mark.parametrize("query", ["last=0", "last=x", "at=noon", "last=100000"])
async def test_invalid_query_is_400(served: httpx.AsyncClient, query: str) -> None:
    answer = await served.get(f"/decisions?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequest"


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/scale", {"model": "m", "replicas": 9}, "TargetError"),
        ("/scale", {"model": "x", "replicas": 1}, "TargetError"),
        ("/mode", {"model": "m", "mode": "x"}, "TargetError"),
        ("/apply", document(gateway={"workers": 0}), "ConfigError"),
    ],
)
async def test_a_refused_change_is_409(served: httpx.AsyncClient, path: str, body: object, kind: str) -> None:
    answer = await served.post(path, json=body)
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert error["type"] == kind
    assert error["message"]
    if kind == "ConfigError":
        assert (error["path"], error["value"]) == ("gateway.workers", 0)
        assert error["expected"]


UNDECODABLE = [
    (path, body)
    for path in ("/replicas", "/signals", "/scale", "/mode", "/apply")
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"model": "\xff"}')
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *UNDECODABLE,
        ("/scale", b'{"model": 1, "replicas": 1}'),
        ("/scale", b'{"model": "m", "replicas": "many"}'),
        ("/scale", b'{"model": "m", "replicas": 1, "for_s": -1}'),
        ("/mode", b'{"model": "m", "mode": "auto", "for_s": "x"}'),
    ],
)
async def test_undecodable_body_is_400(served: httpx.AsyncClient, path: str, body: bytes) -> None:
    answer = await served.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequest"


async def test_stream_coalesces_changes(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versioned_watch, "HEARTBEAT_S", 3600.0)
    await plane.ready(document())
    lines = routes.snapshots(plane.controller)
    first = msgspec.json.decode(await anext(lines), type=FleetSnapshot)
    assert len(first.replicas) == 1
    following = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0)
    plane.controller.scale("m", 3)
    await plane.ticks()
    second = msgspec.json.decode(await following, type=FleetSnapshot)
    assert (len(second.replicas), second.models[0].target) == (3, 3)
    assert second.version > first.version + 1
    await lines.aclose()


@pytest.mark.slow
async def test_stream_repeats_without_changes(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versioned_watch, "HEARTBEAT_S", versioned_watch.COALESCE_S)
    await plane.up(document())
    lines = routes.snapshots(plane.controller)
    first, second = [msgspec.json.decode(await anext(lines), type=FleetSnapshot) for _ in range(2)]
    assert first.version == second.version
    await lines.aclose()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("TargetError", TargetError("why")),
        ("SwitchRefused", SwitchRefused("why")),
        ("Unauthorized", Unreachable("why")),
        ("ConfigError", ConfigError("a.b", 3, "less")),
    ],
)
def test_client_raises_refusals(kind: str, expected: Exception) -> None:
    error = {"type": kind, "message": "why", "path": "a.b", "value": 3, "expected": "less"}
    transport = httpx.MockTransport(lambda _: httpx.Response(409, json={"error": error}))
    client = ControllerClient("c", "s", transport=transport)
    with pytest.raises(type(expected), match=re.escape(str(expected))):
        client.scale("m", 1)
    client.close()


def test_a_client_of_several_controllers_asks_the_one_that_leads() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "one":
            return httpx.Response(503, json={"error": {"type": "NotLeader", "message": "one stands by"}})
        if request.url.host == "two":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"epoch": 1.0, "version": 1, "at": 1.0, "term": 3})

    client = ControllerClient("one:1,two:1,three:1", "s", transport=httpx.MockTransport(answer))
    assert (client.fleet().term, client.fleet().term) == (3, 3)
    assert asked == ["one", "two", "three", "three"]
    client.close()
    client = ControllerClient("one:1,two:1", "s", transport=httpx.MockTransport(answer))
    with pytest.raises(Unreachable, match="one stands by; the controller at two:1 does not answer"):
        client.scale("m", 1)
    client.close()


def test_a_client_without_a_controller_raises_unreachable() -> None:
    client = ControllerClient("127.0.0.1:1", "s", timeout_s=0.2)
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 does not answer"):
        client.status()
    client.close()
