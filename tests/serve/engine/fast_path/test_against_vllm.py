"""The fast path answers as vLLM's app, on one real engine of the bundled model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import pytest_asyncio

from policy.wire.adapter_catalog import served_name
from serve.host.replica_host import ReplicaHost
from tests.e2e.random_requests import Request
from tests.serve.engine.blobs import publish
from tests.serve.engine.fast_path.corpus import SPLIT, TO_VLLM, base, corpus, differences, seen, send
from tests.serve.engine.smollm2 import adapter
from tests.serve.engine.vllm_host import WITHIN_S, running
from tests.serve.hosts import client

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [
    pytest.mark.vllm, pytest.mark.process, pytest.mark.slow, pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3600),
]  # fmt: skip
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MODEL = "smollm2"
# vLLM's metric of its HTTP app.
BY_APP = "http_requests_total{"


class Engine(NamedTuple):
    host: ReplicaHost
    blobs: Path
    http: httpx.AsyncClient

    async def ask(self, request: Request, headers: dict[str, str]) -> httpx.Response:
        return await send(self.http, request, headers)

    async def metric(self, name: str) -> float:
        """The sum of vLLM's metric ``name``, with its labels if any."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def runs(self, requests: int, within_s: float = 60) -> None:
        """Wait until vLLM runs so many."""
        async with asyncio.timeout(within_s):
            while await self.metric("vllm:num_requests_running{") != requests:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    async with (
        running(adapters={"slots_per_replica": 1, "max_rank": 16}) as (host, state),
        client(host.snapshot().url, WITHIN_S) as http,
    ):
        yield Engine(host, state.adapters, http)


async def test_every_answer_is_that_of_vllms_app(engine: Engine) -> None:
    body = {"model": MODEL, "prompt": SPLIT, "add_special_tokens": False}
    split = (await engine.http.post("/tokenize", json=body)).json()["tokens"]
    requests = corpus(MODEL, split)
    assert len(requests) >= 300
    counted = await engine.metric(BY_APP)
    ways = {"fast": 0, "vllm": 0}

    async def ask(request: Request, headers: dict[str, str]) -> httpx.Response:
        ways["vllm" if headers else "fast"] += 1
        return await engine.ask(request, headers)

    found = await differences(requests, ask)
    assert not found, f"{len(found)} of {len(requests)} differ:\n" + "\n".join(found[:5])
    passed_on = await engine.metric(BY_APP) - counted - ways["vllm"]
    print(f"{len(requests)} requests, of which vLLM's app answered {passed_on / ways['fast']:.0%}")  # noqa: T201
    assert 0 < passed_on < 0.6 * ways["fast"]


@pytest.mark.parametrize("headers", [{}, TO_VLLM])
async def test_vllms_metrics_count_every_token(engine: Engine, headers: dict[str, str]) -> None:
    names = [f"vllm:{name}" for name in (
        "inter_token_latency_seconds_count", "inter_token_latency_seconds_bucket", "generation_tokens_total{",
        "time_to_first_token_seconds_count", "prompt_tokens_total{", "e2e_request_latency_seconds_count",
    )]  # fmt: skip
    before = [await engine.metric(name) for name in names]
    body = {"model": MODEL, "prompt": [7] * 40, "max_tokens": 9, "ignore_eos": True, "stream": True}
    answer = await engine.ask(Request(COMPLETION, body), headers)
    assert answer.status_code == 200
    after = [await engine.metric(name) for name in names]
    latencies, buckets, *others = (new - old for new, old in zip(after, before, strict=True))
    assert [latencies, *others] == [8, 9, 1, 40, 1]
    assert 8 <= buckets <= 8 * 30, "cumulative"


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_an_adapters_answers_are_that_of_vllms_app(engine: Engine, path: str) -> None:
    digest = publish(engine.blobs, adapter(1))
    needs = {"x-tidegate-adapter": f"tide@{digest}"}
    name = served_name("tide", digest)

    async def ask(request: Request, headers: dict[str, str]) -> httpx.Response:
        return await engine.ask(request, {**needs, **headers})

    # Of two streams in a row the templates are taken, with which the others are written.
    requests = [Request(path, base(path, name) | {"stream": stream}) for stream in (*[True] * 4, False)]
    assert await differences(requests, ask) == []
    ours = await ask(requests[0], {})
    assert ours.status_code == 200
    plain = await engine.ask(Request(path, base(path, MODEL) | {"stream": True}), {})
    assert seen(ours).events != seen(plain).events
    assert f'"model":"{name}"'.encode() in ours.content


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_client_that_leaves_frees_its_slot(engine: Engine, path: str, stream: bool) -> None:
    """Also beside another request with the same id, which goes on."""
    long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "stream": stream}
    same = {"x-request-id": "same"}
    stays = asyncio.create_task(engine.ask(Request(path, base(path, MODEL) | long), same))
    await engine.runs(1)
    for _ in range(3):
        leaves = asyncio.create_task(engine.ask(Request(path, base(path, MODEL) | long), same))
        await engine.runs(2)
        leaves.cancel()
        await asyncio.wait({leaves})
        await engine.runs(1, within_s=10)
    whole = await stays
    assert (b'"length"' in whole.content, b'"abort"' in whole.content) == (True, False)


@pytest.mark.parametrize("headers", [{}, TO_VLLM])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_request_that_cannot_be_sent_leaves_nothing(
    engine: Engine, path: str, headers: dict[str, str]
) -> None:
    """What vLLM keeps of it would count as waiting for as long as the engine runs."""
    for stream in (True, False):
        body = base(path, MODEL) | {"temperature": 1.0, "top_k": 1 << 64, "stream": stream}
        answer = await engine.ask(Request(path, body), headers)
        assert b'"error"' in answer.content
    async with engine.http.stream("GET", "/internal/load") as lines:
        load = json.loads(await anext(lines.aiter_lines()))["load"]
    assert (load["in_flight"], load.get("waiting", 0)) == (0, 0)


async def test_streams_of_an_engine_that_dies_end_as_those_of_vllms_app(engine: Engine) -> None:
    """The last test: the host starts the engine again under another address."""
    pid = engine.host.snapshot().pid
    ended = {}

    async def follow(way: str, path: str, headers: dict[str, str]) -> None:
        body = base(path, MODEL) | {"max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with engine.http.stream("POST", path, json=body, headers=headers) as answer:
            began.release()
            parts = [part async for part in answer.aiter_bytes()]
        ended[way] = b"".join(parts).split(b"\n\n")[-3:]

    began = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as streams:
        for path in (CHAT, COMPLETION):
            streams.create_task(follow(f"fast {path}", path, {}))
            streams.create_task(follow(f"vllm {path}", path, TO_VLLM))
        for _ in range(4):
            await began.acquire()
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        next(each for each in family if "EngineCore" in " ".join(each.cmdline())).kill()
    for path in (CHAT, COMPLETION):
        assert ended[f"fast {path}"] == ended[f"vllm {path}"]
        assert b"error" in ended[f"fast {path}"][0]
