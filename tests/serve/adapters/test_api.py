"""The controller's HTTP API for adapters, over a store in memory, and the client that reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from policy.errors import AdapterRefused, AdapterUnknown, TargetError, Unreachable
from policy.types import Replica, ReplicaPhase
from policy.wire.adapter_catalog import Alias, CatalogSnapshot, CatalogVersion
from policy.wire.controller import AddAdapterLine, AddAdapterRequest
from policy.wire.heartbeat import AdapterRef, AdapterUse, Heartbeat, HeartbeatResponse
from serve.adapters import api
from serve.adapters.adapter_demand import AdapterDemandTracker
from serve.adapters.placement_loop import AdapterPlacementPlans
from serve.adapters.status import AdaptersStatus, AdapterState, AdapterStatus, AdapterStatusView
from serve.controller.client import ControllerClient
from serve.state import versioned_watch
from tests.serve.fake_adapter_store import digest_of, unreachable
from tests.serve.plane import Plane
from tests.serve.replicas import replica
from tests.serve.sim_documents import deployment, document, sim_model

SLASHED = "org/model"


def adapted(name: str = "m", **adapters: Any) -> dict[str, Any]:
    return sim_model(name, adapters=adapters)


@asynccontextmanager
async def api_of(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    running = asyncio.create_task(plane.controller.adapters.run())
    # A request waits for the records, but not as long as a busy machine may take to open them.
    await plane.controller.adapters.library.line()
    async with plane.client() as client:
        yield client
    running.cancel()
    await asyncio.wait([running])


@pytest.fixture
async def served(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    await plane.ready(document(adapted()))
    async with api_of(plane) as client:
        yield client


async def add(
    client: httpx.AsyncClient, name: str = "sql", source: str = "/a", **over: Any
) -> AddAdapterLine:
    answer = await client.post("/adapters", json={"name": name, "source": source, **over})
    assert answer.status_code == 200, answer.text
    return [msgspec.json.decode(line, type=AddAdapterLine) for line in answer.text.splitlines()][-1]


async def status(client: httpx.AsyncClient) -> AdaptersStatus:
    return msgspec.json.decode((await client.get("/adapters")).content, type=AdaptersStatus)


async def one(client: httpx.AsyncClient) -> AdapterStatus:
    (adapter,) = (await status(client)).adapters
    return adapter


def error(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    return found


async def test_an_adapter_can_be_added_split_rolled_back_and_removed(served: httpx.AsyncClient) -> None:
    first = await add(served)
    assert first.alias is not None
    assert first.alias.split == ((1, 1.0),)
    assert (await one(served)).versions[0].why == ""
    assert (await add(served, source="/b")).alias != first.alias
    answer = await served.post("/adapters/m/sql/split", json={"v1": 95, "v2": 5})
    assert answer.json()["split"] == [[1, 95.0], [2, 5.0]]
    assert (await served.post("/adapters/m/sql/rollback")).json()["split"] == [[1, 1.0]]
    assert (await add(served, source="/c", weight=5)).alias.split == ((1, 95.0), (3, 5.0))  # type: ignore[union-attr]
    answer = await served.post("/adapters/m/sql/rollback", json={"to": "v2"})
    assert answer.json()["split"] == [[2, 1.0]]
    assert (await served.delete("/adapters/m/sql")).json() == {"model": "m", "name": "sql"}
    assert (await status(served)).adapters == ()
    gone = await served.delete("/adapters/m/sql")
    assert (gone.status_code, error(gone)["type"]) == (404, "AdapterUnknown")


async def test_model_name_with_a_slash(plane: Plane) -> None:
    await plane.up(document(adapted(SLASHED)))
    async with api_of(plane) as client:
        await add(client)
        for name in (SLASHED, "org%2Fmodel"):
            answer = await client.post(f"/adapters/{name}/sql/split", json={"v1": 1})
            assert (answer.status_code, answer.json()["model"]) == (200, SLASHED)
        assert (await client.delete(f"/adapters/{SLASHED}/sql")).status_code == 200


async def test_progress_is_streamed(
    plane: Plane, served: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "PROGRESS_S", 0.001)
    plane.store.gate.clear()
    library = plane.controller.adapters.library
    lines = api.progress(library.add(AddAdapterRequest(name="sql", source="/a")), library.catalog.revision)
    seen = []
    async for raw in lines:
        seen.append(msgspec.json.decode(raw, type=AddAdapterLine))
        if seen[-1].step == "fetch":
            plane.store.gate.set()
    assert AddAdapterLine(step="fetch", message="/a", done=50, total=100) in seen
    assert seen[-1].alias is not None


async def test_an_import_continues_without_its_client(plane: Plane, served: httpx.AsyncClient) -> None:
    plane.store.gate.clear()
    asking = asyncio.create_task(add(served))
    while not plane.store.imported:  # noqa: ASYNC110 - the thread has no event
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.wait([asking])
    shown = await one(served)
    assert (shown.state, shown.note) == (AdapterState.FETCHING, "/a")
    plane.store.gate.set()
    while (await one(served)).state is AdapterState.FETCHING:  # noqa: ASYNC110 - no event is set
        await asyncio.sleep(0.001)
    assert (await one(served)).state is AdapterState.READY


@pytest.mark.parametrize(
    ("method", "path", "body", "status_code", "kind"),
    [
        ("POST", "/adapters", {"name": "a/b", "source": "/a"}, 400, "AdapterRefused"),
        ("POST", "/adapters", {"name": "sql", "source": "/a", "model": "x"}, 409, "TargetError"),
        ("POST", "/adapters", {"name": "sql", "source": "/a", "tenants": ["x"]}, 409, "ConfigError"),
        ("POST", "/adapters", {"name": "sql"}, 400, "BadRequest"),
        ("POST", "/adapters", {"name": "sql", "source": "/a", "tenant": "x"}, 400, "BadRequest"),
        ("POST", "/adapters/m/sql/split", {"v1": 1}, 404, "AdapterUnknown"),
        ("POST", "/adapters/m/sql/split", {"v1": "x"}, 400, "BadRequest"),
        ("POST", "/adapters/m/sql/rollback", None, 404, "AdapterUnknown"),
        ("POST", "/adapters/m/sql/rollback", {"too": "v1"}, 400, "BadRequest"),
        ("DELETE", "/adapters/m/sql", None, 404, "AdapterUnknown"),
        ("GET", "/adapters/blobs/" + "a" * 64, None, 404, "AdapterUnknown"),
        ("GET", "/adapters/blobs/%2e%2e", None, 404, "AdapterUnknown"),
        ("GET", "/adapters/blobs/xyz", None, 404, "AdapterUnknown"),
    ],
)
async def test_invalid_requests_are_refused(  # noqa: PLR0917 - a row of the table
    served: httpx.AsyncClient, method: str, path: str, body: object, status_code: int, kind: str
) -> None:
    answer = await served.request(method, path, json=body)
    assert answer.status_code == status_code
    assert error(answer)["type"] == kind
    if kind == "AdapterRefused":
        assert error(answer)["code"] == "name"


@pytest.mark.slow
async def test_the_catalog_stream_sends_each_change_and_repeats_the_last_line_as_a_heartbeat(
    plane: Plane, served: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versioned_watch, "HEARTBEAT_S", 3600.0)
    library = plane.controller.adapters.library
    lines = library.catalog.revision.stream(library.line)
    first = msgspec.json.decode(await anext(lines), type=CatalogSnapshot)
    assert (first.epoch, first.aliases) == (1000.0, ())
    following = asyncio.ensure_future(anext(lines))
    await add(served)
    second = msgspec.json.decode(await following, type=CatalogSnapshot)
    assert (second.epoch, second.aliases[0].name) == (1000.0, "sql")
    assert second.version > first.version
    monkeypatch.setattr(versioned_watch, "HEARTBEAT_S", versioned_watch.COALESCE_S)
    assert msgspec.json.decode(await anext(lines), type=CatalogSnapshot) == second
    await lines.aclose()


async def beat(client: httpx.AsyncClient, sender: Replica, *uses: AdapterUse) -> HeartbeatResponse:
    answer = await client.post("/replicas", content=msgspec.json.encode(Heartbeat(replica=sender, uses=uses)))
    return msgspec.json.decode(answer.content, type=HeartbeatResponse)


async def test_the_state_follows_load_failures_of_replicas(plane: Plane, served: httpx.AsyncClient) -> None:
    await add(served)
    plane.cluster.replicas.clear()
    await beat(served, replica("m-small-g1-1", state=ReplicaPhase.STOPPED))
    digest = digest_of("/a")
    name = f"sql@{digest[:12]}"
    failed = AdapterUse(name="sql", digest=digest, failed="base_model: why")
    await beat(
        served, replica("r1", adapters=(name,)), AdapterUse(name="sql", digest=digest, requests=4, found=3)
    )
    await beat(served, replica("r2"), failed)
    adapter = await one(served)
    assert adapter.state is AdapterState.PARTIAL
    assert [(r.replica, r.reason) for r in adapter.versions[0].refused] == [("r2", "base_model: why")]
    assert adapter.versions[0].loaded == ("r1",)
    assert (adapter.hit_rate, adapter.last_used) == (0.75, plane.now)
    # The replica loads and evicts it without a change of state.
    await beat(served, replica("r1"))
    assert (await one(served)).state is AdapterState.PARTIAL
    await beat(served, replica("r1"), failed)
    assert (await one(served)).state is AdapterState.FAILED
    await beat(served, replica("r1"), AdapterUse(name="sql", digest=digest, loads=1))
    await beat(served, replica("r2"), AdapterUse(name="sql", digest=digest, loads=1))
    assert (await one(served)).state is AdapterState.READY


async def test_starting_replica_gets_its_plan(plane: Plane, served: httpx.AsyncClient) -> None:
    await add(served)
    digest = digest_of("/a")
    (running,) = plane.cluster.replicas.values()
    assert (await beat(served, running, AdapterUse(name="sql", digest=digest, requests=50))).hold is None
    plane.now += 10
    await plane.controller.tick()
    wanted = AdapterRef(name="sql", digest=digest)
    assert (await beat(served, running)).hold == (wanted,)
    await beat(served, msgspec.structs.replace(running, state=ReplicaPhase.STOPPED))
    starting = replica("new", state=ReplicaPhase.STARTING)
    assert (await beat(served, starting)).hold is None
    await plane.controller.tick()
    assert (await beat(served, starting)).hold == (wanted,), "before five seconds have passed"


@pytest.mark.slow
async def test_missing_source_is_shown_with_its_reason(plane: Plane) -> None:
    plane.store.contents |= {"hf:o/away": unreachable("no route"), "hf:o/bad": AdapterRefused("dora", "DoRA")}
    sources = [{"name": name, "source": f"hf:o/{name}"} for name in ("away", "bad", "good")]
    await plane.up(document(adapted(sources=sources)))
    adapters = plane.controller.adapters
    running = asyncio.create_task(adapters.run())
    while len(adapters.declared.troubles) < 2 or not adapters.library.catalog.of("m"):
        adapters.changed.set()
        await asyncio.sleep(0.001)
    shown = {each.name: (each.state, each.note) for each in adapters.status().adapters}
    assert shown == {
        "away": (AdapterState.FETCHING, "no route"),
        "bad": (AdapterState.FAILED, "DoRA"),
        "good": (AdapterState.READY, ""),
    }
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.slow
async def test_an_adapter_of_a_former_base_model_is_shown_with_the_reason(
    plane: Plane, served: httpx.AsyncClient
) -> None:
    await add(served)
    adapters = plane.controller.adapters
    await adapters.bases.step()
    plane.store.unfit = {digest_of("/a"): "made for another"}
    adapters.declare(deployment({**adapted(), "source": "/other-base"}), applied=True)
    while not (shown := await one(served)).note:  # noqa: ASYNC110 - no event is set
        await asyncio.sleep(0.001)
    assert (shown.state, shown.note) == (AdapterState.READY, "v1 does not fit the model: made for another")


def answering(status_code: int, content: bytes) -> ControllerClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(status_code, content=content))
    return ControllerClient("c", "s", transport=transport)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"type": "AdapterRefused", "code": "rank", "message": "why"}, AdapterRefused),
        ({"type": "AdapterUnknown", "message": "why"}, AdapterUnknown),
        ({"type": "TargetError", "message": "why"}, TargetError),
        ({"type": "TidegateError", "message": "why"}, Unreachable),
    ],
)
@pytest.mark.parametrize("status_code", [200, 400])
def test_client_raises_stream_errors(
    body: dict[str, str], expected: type[Exception], status_code: int
) -> None:
    client = answering(status_code, msgspec.json.encode({"error": body}) + b"\n")
    with pytest.raises(expected, match="why"):
        client.add_adapter(AddAdapterRequest(name="sql", source="/a"), lambda line: None)
    client.close()


def test_interrupted_stream_is_unreachable() -> None:
    # A line of text ends at the second character too, one of NDJSON does not.
    line = AddAdapterLine(step="fetch", message="copying \u2028")
    client = answering(200, msgspec.json.encode(line) + b"\n")
    lines: list[AddAdapterLine] = []
    with pytest.raises(Unreachable, match="ended before it was done"):
        client.add_adapter(AddAdapterRequest(name="sql", source="/a"), lines.append)
    assert lines == [line]
    client.close()


def test_instants_of_the_api_are_unix_seconds() -> None:
    demand = AdapterDemandTracker()
    placing = AdapterPlacementPlans(demand, lambda replica: 1)
    digest = digest_of("/a")
    used = AdapterUse(name="sql", digest=digest, requests=1, failed="why")
    demand.note(Heartbeat(replica=replica("r1"), uses=(used,)), 7.0)
    version = CatalogVersion(number=1, digest=digest, rank=8, size=10, source="/a", at=1e9)
    alias = Alias(model="m", name="sql", revision=1, versions=(version,), split=((1, 1.0),))
    shown = AdapterStatusView([replica("r1")], demand, placing, 10.0, 2e9).of(alias)
    assert shown.last_used == 2e9 - 3.0
    assert (shown.versions[0].refused[0].at, shown.versions[0].at) == (2e9 - 3.0, 1e9)
