"""Adapters on a real vLLM engine with one slot, and as many in its own memory.

They are loaded during a stream, evicted, refused, and used after their files were deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from policy.wire.adapter_catalog import served_name
from policy.wire.headers import SECRET_HEADER
from policy.wire.heartbeat import AdapterRef
from serve.host.replica_host import ReplicaHost
from store.adapters.blobs import AdapterBlobStore
from tests.serve.engine.blobs import publish
from tests.serve.engine.sim.conversations import parameters
from tests.serve.engine.smollm2 import adapter, bad_adapters
from tests.serve.engine.vllm_host import WITHIN_S, running

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
PROMPT = "The capital of France is"


class Engine:
    """One engine process behind its host, with requests as a gateway sends them."""

    def __init__(self, host: ReplicaHost, blobs: Path) -> None:
        self.host = host
        self.blobs = blobs
        self.came: list[float] = []
        self.http = httpx.AsyncClient(
            base_url=host.snapshot().url, headers={SECRET_HEADER: "s"}, timeout=WITHIN_S, trust_env=False
        )

    def adapter(self, name: str, files: Mapping[str, bytes]) -> AdapterRef:
        return AdapterRef(name=name, digest=publish(self.blobs, files))

    async def ask(self, wanted: AdapterRef | None, *, named: bool = True, tokens: int = 8) -> httpx.Response:
        headers = {}
        if wanted is not None and named:
            headers["x-tidegate-adapter"] = f"{wanted.name}@{wanted.digest}"
        model = "smollm2" if wanted is None else served_name(wanted.name, wanted.digest)
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def text(self, wanted: AdapterRef | None, tokens: int = 8) -> str:
        answer = await self.ask(wanted, tokens=tokens)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        if wanted is not None:
            assert body["model"] == served_name(wanted.name, wanted.digest)
        return str(body["choices"][0]["text"])

    async def stream(self, tokens: int) -> list[float]:
        """Arrival times of the tokens of a long greedy answer of the base model."""
        body = {
            "model": "smollm2", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        self.came = came = []
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            finished = ""
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                came.append(asyncio.get_running_loop().time())
                finished = msgspec.json.decode(line[6:])["choices"][0]["finish_reason"]
        assert finished == "length"
        return came

    async def models(self) -> list[str]:
        return [entry["id"] for entry in (await self.http.get("/v1/models")).json()["data"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    async with running(adapters={"slots_per_replica": 1, "max_rank": 16}) as (host, state):
        made = Engine(host, state.adapters)
        async with made.http:
            yield made


async def test_an_adapter_changes_answers_and_is_evicted_for_another(engine: Engine) -> None:
    a, b = (engine.adapter("sql", adapter(seed)) for seed in (1, 2))
    base = await engine.text(None)
    texts = {digest.digest: await engine.text(digest) for digest in (a, b)}
    assert len({base, *texts.values()}) == 3
    # There is one slot: the last adapter is loaded; the other is loaded again, with the same text.
    assert await engine.models() == ["smollm2", served_name("sql", b.digest)]
    without_header = await engine.ask(a, named=False)
    assert without_header.status_code == 404
    assert await engine.text(a) == texts[a.digest]
    assert await engine.text(None) == base


async def test_parameters_are_taken_or_refused_as_the_simulated_engine_does(engine: Engine) -> None:
    for path, body, taken in parameters("smollm2"):
        answer = await engine.http.post(path, json=body)
        assert (answer.status_code == 200) is taken, (path, body, answer.text)


@pytest.mark.usefixtures("idle_cores")
async def test_a_load_delays_a_stream_by_less_than_a_step(engine: Engine) -> None:
    others = [engine.adapter(f"beside{seed}", adapter(seed)) for seed in (10, 11)]
    tokens, loads = 320, 0
    streaming = asyncio.ensure_future(engine.stream(tokens))
    while not streaming.done():
        if len(engine.came) <= tokens // 2:
            await asyncio.sleep(0.05)
        else:  # the adapters alternate in the one slot
            await engine.text(others[loads % 2], tokens=1)
            loads += 1
    came = await streaming
    gaps = [after - before for before, after in pairwise(came)]
    alone, beside = sorted(gaps[: tokens // 2 - 1]), sorted(gaps[tokens // 2 :])
    assert loads >= 5
    # The longest gaps of each, as many as there were loads: other load of the machine is in both.
    increase = median(beside[-loads:]) - median(alone[-loads:])
    summary = f"{loads} loads: longest gaps {median(alone[-loads:]):.3f} -> {median(beside[-loads:]):.3f} s"
    print(f"{summary}, a step takes {median(alone):.3f} s")  # noqa: T201 - what docs/adapters.md says
    assert increase <= median(alone), summary


async def test_concurrent_first_requests_are_one_load(engine: Engine) -> None:
    cold = engine.adapter("cold", adapter(20))
    engine.host.take_heartbeat()
    answers = await asyncio.gather(*(engine.ask(cold, tokens=2) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    loads = 0
    async with asyncio.timeout(WITHIN_S):
        while not loads:
            await asyncio.sleep(0.05)
            loads += sum(use.loads for use in engine.host.take_heartbeat().uses)
    await asyncio.sleep(1.5)
    assert loads + sum(use.loads for use in engine.host.take_heartbeat().uses) == 1


async def test_disconnects_never_serve_others_with_the_wrong_adapter(engine: Engine) -> None:
    adapters = [engine.adapter(f"turn{seed}", adapter(seed)) for seed in (60, 61, 62)]
    alone = [await engine.text(each, tokens=3) for each in adapters]
    assert len(set(alone)) == 3

    async def one(number: int) -> None:
        wanted = adapters[number % 3]
        if number % 4:
            assert (await engine.text(wanted, tokens=3)) == alone[number % 3]
            return
        # Leaves before, while and after its adapter is loaded.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1 * number):
                await engine.ask(wanted, tokens=200)

    await asyncio.gather(*(one(number) for number in range(36)))
    assert engine.host.snapshot().incarnation == 0
    assert len(await engine.models()) == 2
    assert await engine.text(adapters[0], tokens=3) == alone[0]


async def test_invalid_adapters_are_refused_and_others_served(engine: Engine) -> None:
    base = await engine.text(None)
    for what, files in bad_adapters().items():
        bad = engine.adapter(what.replace(" ", "-"), files)
        refused = await engine.ask(bad)
        assert (refused.status_code, refused.headers.get("x-tidegate-refusal")) == (503, "adapter_failed"), (
            what
        )
        assert "engine_refused" in refused.json()["error"]["message"], what
        assert await engine.text(None) == base, what
    assert len(await engine.models()) <= 2
    assert await engine.text(engine.adapter("good", adapter(30)))


async def test_fifty_loads_leak_nothing(engine: Engine) -> None:
    files = adapter(40)
    texts = {await engine.text(engine.adapter(f"name{number}", files), tokens=2) for number in range(50)}
    assert len(texts) == 1
    assert await engine.models() == ["smollm2", served_name("name49", engine.adapter("x", files).digest)]


async def test_an_adapter_with_deleted_files_is_served_until_it_is_evicted(engine: Engine) -> None:
    deleted, other = engine.adapter("deleted", adapter(50)), engine.adapter("other", adapter(51))
    text = await engine.text(deleted)
    assert AdapterBlobStore(engine.blobs).remove(deleted.digest)
    assert await engine.text(deleted) == text
    await engine.text(other)
    gone = await engine.ask(deleted)
    assert (gone.status_code, gone.headers["x-tidegate-refusal"]) == (503, "adapter_failed")
    assert "files_missing" in gone.json()["error"]["message"]
    assert await engine.text(other)
    assert engine.host.snapshot().incarnation == 0
