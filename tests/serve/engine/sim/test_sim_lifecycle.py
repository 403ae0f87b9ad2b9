"""The simulated engine: disconnects free slots, a dead step loop is reported, metrics count."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from policy.errors import EngineFailed
from policy.types import Runner
from serve.engine.interface import Engine
from serve.engine.sim.engine import create
from serve.engine.sim.step_loop import StepLoop
from tests.serve.sim_driver import FROZEN, client_of, engine_of, post, spec, until

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 50}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a", "max_tokens": 50, "n": 3},
    "/v1/responses": {"input": "a", "max_output_tokens": 50},
    "/v1/messages": {"model": "base", **CHAT},
}


def held(engine: Engine) -> tuple[int, int, float]:
    stats = engine.stats()
    return stats.running, stats.waiting, stats.kv_used


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_disconnect_frees_the_slot_in_the_running_step(path: str, stream: bool) -> None:
    async with engine_of(spec(speed=FROZEN)) as engine:
        request = post(engine, path, {**BODIES[path], "stream": stream})
        await until(lambda: engine.stats().kv_used > 0)
        assert engine.stats().running == BODIES[path].get("n", 1)
        request.leave()
        await request.task
        assert held(engine) == (0, 0, 0.0)


async def test_a_disconnect_while_queued_removes_only_that_request() -> None:
    async with engine_of(spec(speed=FROZEN, max_num_seqs=1)) as engine:
        first = post(engine, "/v1/chat/completions", CHAT)
        await until(lambda: engine.stats().running == 1)
        second = post(engine, "/v1/chat/completions", CHAT)
        await until(lambda: engine.stats().waiting == 1)
        second.leave()
        await second.task
        assert held(engine)[:2] == (1, 0)
        first.leave()
        await first.task


async def test_a_dead_step_loop_fails_its_requests_and_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    async with engine_of(spec()) as engine:
        await engine.check()
        monkeypatch.setattr(StepLoop, "_deliver", broken)
        async with client_of(engine) as client:
            answer = await client.post("/v1/chat/completions", json=CHAT)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, 500)
            with pytest.raises(EngineFailed, match="a bug"):
                await engine.check()
            # A request that comes later is answered too.
            later = await client.post("/v1/chat/completions", json=CHAT)
            assert later.json()["error"]["type"] == "InternalServerError"


async def test_a_stream_ends_with_an_error_event_when_the_engine_fails() -> None:
    engine = await create(spec(speed=FROZEN))
    request = post(engine, "/v1/chat/completions", {**CHAT, "stream": True})
    await until(lambda: engine.stats().running == 1)
    await engine.close()
    await request.task
    assert b'data: {"error":' in request.body
    assert request.body.endswith(b"data: [DONE]\n\n")


async def test_metrics_have_vllms_names() -> None:
    async with engine_of(spec()) as engine, client_of(engine) as client:
        for _ in range(2):
            answer = await client.post("/v1/completions", json={"prompt": "tide " * 40, "max_tokens": 5})
            assert answer.status_code == 200
        lines = (await client.get("/metrics")).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

        def value(name: str, more: str = "") -> float:
            return float(values[f'vllm:{name}{{engine="0",{more}model_name="base"}}'])

        assert value("prompt_tokens_total") == 82
        assert value("generation_tokens_total") == 10
        assert value("prefix_cache_queries_total") == 82
        assert value("prefix_cache_hits_total") == 32
        assert value("request_success_total", 'finished_reason="length",') == 2
        assert value("time_to_first_token_seconds_count") == 2
        assert value("inter_token_latency_seconds_count") == 8
        assert value("e2e_request_latency_seconds_count") == 2
        assert value("iteration_tokens_total_sum") == engine.stats().tokens == 82 - 32 + 2 * 4
        assert value("num_preemptions_total") == 0
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert value(gauge) == 0
        assert engine.stats().steps == 10


async def test_a_pooling_engine_embeds_scores_and_has_no_chat() -> None:
    async with engine_of(spec(runner=Runner.POOLING)) as engine, client_of(engine) as client:
        body = {"input": ["sea and sand", "sea and salt", "quarterly earnings"]}
        data = (await client.post("/v1/embeddings", json=body)).json()
        near, also, far = (entry["embedding"] for entry in data["data"])

        def dot(one: list[float], other: list[float]) -> float:
            return sum(a * b for a, b in zip(one, other, strict=True))

        assert dot(near, near) == pytest.approx(1.0)
        assert dot(near, also) > 0.5 > dot(near, far)
        assert data["usage"]["prompt_tokens"] > 0
        short = (await client.post("/v1/embeddings", json={"input": "sea", "dimensions": 8})).json()
        assert len(short["data"][0]["embedding"]) == 8
        pairs = {"text_1": "sea and sand", "text_2": ["quarterly earnings", "sea and salt"]}
        scores = (await client.post("/v1/score", json=pairs)).json()["data"]
        assert scores[1]["score"] > scores[0]["score"] >= 0
        ask = {"query": pairs["text_1"], "documents": pairs["text_2"], "top_n": 1}
        (best,) = (await client.post("/v1/rerank", json=ask)).json()["results"]
        assert (best["index"], best["document"]["text"]) == (1, "sea and salt")
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 404
        assert held(engine) == (0, 0, 0.0)


async def test_sleep_waits_for_requests_and_clears_the_cache() -> None:
    made = msgspec.structs.replace(spec(speed=1.0), sleeps=True)
    body = {"prompt": "a" * 400, "max_tokens": 20, "ignore_eos": True}
    async with engine_of(made) as engine, client_of(engine) as client:
        assert await cached(client, body) == 0
        assert await cached(client, body) > 0
        request = post(engine, "/v1/completions", {**body, "stream": True})
        await until(lambda: engine.stats().running == 1)
        await engine.sleep()
        assert engine.stats().running == 0
        await request.task
        assert b"[DONE]" in request.body
        await engine.wake()
        assert await cached(client, body) == 0


async def cached(client: httpx.AsyncClient, body: dict[str, Any]) -> int:
    usage = (await client.post("/v1/completions", json=body)).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def test_a_dead_engine_does_not_fall_asleep() -> None:
    async with engine_of(spec(speed=FROZEN)) as engine:
        request = post(engine, "/v1/completions", {"prompt": "a", "max_tokens": 5})
        await until(lambda: engine.stats().running == 1)
        falling = asyncio.ensure_future(engine.sleep())
        await asyncio.sleep(0)
        engine._loop._task.cancel()  # type: ignore[attr-defined]
        with pytest.raises(EngineFailed):
            await falling
        await request.task
