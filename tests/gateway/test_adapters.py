"""Requests for adapters through a real worker: who may name them, which version serves, and where."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.protocol.paths import ROUTES
from policy.wire.adapter_catalog import served_name
from tests.gateway.fake_replica import Exchange, FakeReplica, alias, event, hold
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.worker import Stack, model, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
OLD, NEW, OTHER = (hashlib.sha256(name).hexdigest() for name in (b"old", b"new", b"other"))
ADAPTERS = {"adapters": {"slots_per_replica": 4}}


async def echo(exchange: Exchange) -> None:
    """Answer as engines do, with the model that was named."""
    body = exchange.json
    answer = {"id": "x", "model": body["model"], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    if exchange.path == "/v1/embeddings":
        answer["data"] = [{"index": i, "embedding": [0.0]} for i, _ in enumerate(body["input"])]
    if not body.get("stream"):
        await exchange.reply(json.dumps(answer).encode())
        return
    await exchange.head("text/event-stream")
    await exchange.chunk(event("a").replace(b'"alpha"', json.dumps(body["model"]).encode()))
    await exchange.chunk(event(finish="stop") + b"data: [DONE]\n\n")
    await exchange.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A worker for models that take adapters, without tenants."""
    stack = Stack(tmp_path_factory.mktemp("adapters"))
    stack.models = [
        model("alpha", **ADAPTERS),
        model("beta", **ADAPTERS),
        model("vectors", runner="pooling", **ADAPTERS),
    ]
    stack.gateway |= {"coalesce": {"window_s": 0.05, "max_inputs": 8}}
    await stack.start_controller()
    await stack.start_worker()
    yield stack
    await stack.close()


async def fleet(stack: Stack, name: str, *, count: int = 1, model: str = "alpha") -> list[FakeReplica]:
    replicas = [await stack.replica(f"{name}-{i}", model=model) for i in range(count)]
    for replica in replicas:
        replica.answer = echo
    await stack.ready(*replicas)
    return replicas


async def publish(stack: Stack, *aliases: dict[str, Any]) -> None:
    """Publish a catalog and wait until the worker follows it; each catalog has a unique name."""
    mark = f"mark-{stack.controller.version}"
    stack.controller.publish(*aliases, alias(mark, OTHER))
    await stack.answers(200, f"/v1/models/{mark}")


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/v1/chat/completions", "alpha"),
        ("/v1/completions", "alpha"),
        ("/v1/responses", "alpha"),
        ("/v1/messages", "alpha"),
        ("/v1/messages/count_tokens", "alpha"),
        ("/v1/tokenize", "alpha"),
        ("/v1/detokenize", "alpha"),
        ("/v1/tokenize", "vectors"),
        ("/v1/embeddings", "vectors"),
        ("/v1/score", "vectors"),
        ("/v1/rerank", "vectors"),
    ],
)
async def test_each_route_names_the_version_to_both_sides(shared: Stack, path: str, base: str) -> None:
    (replica,) = await fleet(shared, f"route{path.replace('/', '-')}-{base}", model=base)
    await publish(shared, alias("sql", OLD, NEW, model=base))
    body = {"model": "sql", "input": ["x"], "metadata": {"model": "sql"}}
    answer = await shared.http.post(path + "?beta=true", json=body)
    served = served_name("sql", NEW)
    assert (answer.status_code, answer.json()["model"]) == (200, served)
    (hit,) = replica.hits
    assert hit.path == ROUTES[path].upstream.decode()
    assert hit.headers["x-tidegate-adapter"] == f"sql@{NEW}"
    assert hit.json["model"] == served
    assert hit.json["metadata"] == {"model": "sql"}


async def occupied(
    stack: Stack, name: str, **body: Any
) -> tuple[FakeReplica, asyncio.Event, asyncio.Task[httpx.Response]]:
    """A replica whose only slot this request holds until the event is set; "sql" is published."""
    (replica,) = await fleet(stack, name)
    replica.report(bound=1)
    await publish(stack, alias("sql", OLD))
    release = asyncio.Event()
    replica.answer = hold(release, echo)
    holder = asyncio.create_task(stack.chat(**body))
    await until(lambda: len(replica.hits) == 1)
    return replica, release, holder


async def test_a_queued_request_keeps_the_version_at_its_arrival(shared: Stack) -> None:
    _, release, first = await occupied(shared, "replaced", model="sql")
    waits = asyncio.create_task(shared.chat(model="sql"))
    await shared.queued(1)
    await publish(shared, alias("sql", OLD, NEW))
    later = asyncio.create_task(shared.chat(model="sql"))
    release.set()
    answers = [(await one).json()["model"] for one in (first, waits, later)]
    assert answers == [served_name("sql", OLD)] * 2 + [served_name("sql", NEW)]


async def test_shared_calls_never_mix_versions(shared: Stack) -> None:
    (replica,) = await fleet(shared, "coalesced", model="vectors")
    await publish(shared, alias("near", OLD, NEW, model="vectors", split=[(1, 1.0), (2, 1.0)]))

    async def ask(name: str, session: int) -> tuple[str, httpx.Response]:
        headers = {"x-session-id": str(session)}
        return name, await shared.http.post(
            "/v1/embeddings", json={"model": name, "input": ["x"]}, headers=headers
        )

    before = await shared.metric("tidegate_coalesced_requests_total", model="vectors")
    answers = await asyncio.gather(*(ask(name, i) for i in range(12) for name in ("near", "vectors")))
    assert {answer.status_code for _, answer in answers} == {200}
    versions = {served_name("near", OLD), served_name("near", NEW)}
    for name, answer in answers:
        assert answer.json()["model"] in (versions if name == "near" else {"vectors"})
    for hit in replica.hits:
        adapter = hit.headers.get("x-tidegate-adapter", "vectors")
        assert hit.json["model"] == (adapter[: len("near@") + 12] if adapter != "vectors" else adapter)
    assert await shared.metric("tidegate_coalesced_requests_total", model="vectors") > before
    assert len(replica.hits) < 24


async def test_waiting_requests_fail_at_once_if_no_replica_can_load_the_adapter(shared: Stack) -> None:
    replica, release, holder = await occupied(shared, "waiting")
    waiting = [asyncio.create_task(shared.chat(model="sql")) for _ in range(5)]
    await shared.queued(5)
    replica.report(refused=[served_name("sql", OLD)])
    codes = [(await one).json()["error"]["code"] for one in waiting]
    assert codes == ["adapter_failed"] * 5
    assert not holder.done()
    release.set()
    assert (await holder).status_code == 200


async def test_a_provider_serves_only_adapters_that_it_lists(tmp_path: Any) -> None:
    upstream = FakeUpstream()
    await upstream.start()
    stack = Stack(tmp_path)
    stack.models = [model("alpha", **ADAPTERS, control={"assumed_start_s": 60.0})]
    stack.gateway = {"queue_timeout_s": 1}
    stack.upstreams = [
        {
            "name": "spare",
            "url": f"{upstream.url}/v1",
            "models": {"alpha:sql": "their-sql"},
            "price": {"input": 1.0, "output": 1.0},
            "cost_cap_per_h": 1000,
        }
    ]
    try:
        await stack.start_controller()
        await stack.start_worker()
        await publish(stack, alias("sql", OLD, NEW), alias("chat", OTHER))
        for name, status in (
            ("sql", 200),
            ("alpha:sql", 200),
            ("chat", 503),
            ("alpha", 503),
            (f"sql@{OLD}", 503),
        ):
            assert (await stack.chat(model=name)).status_code == status
        assert [hit.json["model"] for hit in upstream.hits] == ["their-sql"] * 2
        assert all("x-tidegate-adapter" not in hit.headers for hit in upstream.hits)
    finally:
        await stack.close()
        await upstream.stop()
