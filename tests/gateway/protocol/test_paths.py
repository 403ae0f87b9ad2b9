"""What the client port accepts and how it refuses."""

from __future__ import annotations

import json

import pytest

from tests.gateway.fake_replica import DONE, STREAM, event, stream
from tests.gateway.worker import Stack, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
TOKENS = ("prompt", "cached", "completion")
CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(("path", "model"), [("/v1/embeddings", "alpha"), ("/v1/messages", "vectors")])
async def test_a_model_with_the_wrong_runner_is_refused(shared: Stack, path: str, model: str) -> None:
    answer = await shared.http.post(path, json={"model": model, "input": "x"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert model in error["message"]
    assert ("generate" if model == "alpha" else "pooling") in error["message"]
    assert error["param"] == "model"


async def test_a_body_over_the_cap_is_413(shared: Stack) -> None:
    shared.gateway["max_body_bytes"] = 2048
    shared.write_document()
    try:

        async def too_large(content: object) -> bool:
            answer = await shared.http.post("/v1/chat/completions", content=content)  # type: ignore[arg-type]
            return answer.status_code == 413

        await until(lambda: too_large(b" " * 4096))

        async def pieces():  # type: ignore[no-untyped-def]
            for _ in range(4):
                yield b" " * 1024

        assert await too_large(pieces())
    finally:
        del shared.gateway["max_body_bytes"]
        shared.write_document()


async def test_only_listed_headers_reach_the_replica(shared: Stack) -> None:
    replica = await shared.serve("headers")
    sent = {
        "authorization": "Bearer secret",
        "x-vllm-priority": "9",
        "x-data-parallel-rank": "1",
        "x-tidegate-secret": "guess",
        "x-tidegate-prefill": "999999",
        "x-tidegate-prefix": "ff",
        "cookie": "a=b",
        "anthropic-version": "2023-06-01",
        "x-request-id": "my_id-1",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "vendor=1",
    }
    answer = await shared.http.post("/v1/chat/completions", json=CHAT, headers=sent)
    assert answer.headers["x-request-id"] == "my_id-1"
    got = replica.hits[0].headers
    assert set(got) == {
        "host", "content-type", "content-length", "x-tidegate-secret", "x-request-id", "accept",
        "anthropic-version", "x-tidegate-prefill", "x-tidegate-engine-s", "traceparent", "tracestate",
    }  # fmt: skip
    assert got["x-tidegate-secret"] != "guess"
    assert int(got["x-tidegate-prefill"]) < 999
    assert got["x-request-id"].startswith("my_id-1-")


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/tokenize"])
async def test_counting_tokens_is_no_prefill_and_caches_no_prefix(shared: Stack, path: str) -> None:
    replica = await shared.serve("counts")
    labels = {"model": "alpha", "route": path, "outcome": "ok"}
    before = await shared.metric("tidegate_requests_total", **labels)
    body = {"model": "alpha", "messages": [{"role": "user", "content": "hi " * 9000}]}
    assert (await shared.http.post(path, json=body)).status_code == 200
    headers = replica.hits[0].headers
    assert int(headers["x-tidegate-prefill"]) <= 1 and "x-tidegate-prefix" not in headers
    assert await shared.metric("tidegate_requests_total", **labels) == before + 1
    refused = await shared.http.post(path, json={**body, "model": "nobody"})
    assert ("type" in refused.json()) is path.startswith("/v1/messages") and refused.status_code == 404
    # The same prompt is new to the replica when it is to be answered.
    await shared.http.post("/v1/messages", json={**body, "max_tokens": 1})
    assert "x-tidegate-prefix" in replica.hits[-1].headers


@pytest.mark.parametrize("piece", [None, 7], ids=["whole", "pieces"])
async def test_a_stream_that_begins_with_a_rejection_becomes_a_400(shared: Stack, piece: int | None) -> None:
    """vLLM checks some parameters only after it has sent the head of the stream."""
    replica = await shared.serve("late-rejection")
    error = {"message": "no such token", "type": "BadRequestError", "param": "logit_bias", "code": 400}
    replica.answer = stream(b"data: " + json.dumps({"error": error}).encode() + b"\n\n" + DONE, piece=piece)
    answer = await shared.chat(stream=True)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"] == {**error, "type": "invalid_request_error", "code": None}
    replica.answer = stream(STREAM)
    assert (await shared.chat(stream=True)).content == STREAM


async def served_streams(stack: Stack) -> float:
    lines = (await stack.admin.get("/metrics")).text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("tidegate_served_streams_total{")
    )


async def test_the_metrics_move_and_keep_to_known_names(shared: Stack) -> None:
    await shared.serve("metrics")
    labels = {"model": "alpha", "route": "/v1/chat/completions", "outcome": "ok"}
    before = await shared.metric("tidegate_requests_total", **labels)
    ttft = await shared.metric("tidegate_ttft_seconds_count", model="alpha")
    streams = await served_streams(shared)
    tokens = [await shared.metric("tidegate_tokens_total", model="alpha", kind=k) for k in TOKENS]
    await shared.chat()
    await shared.chat(stream=True)
    await shared.chat(model="made-up-name")
    counted = [await shared.metric("tidegate_tokens_total", model="alpha", kind=k) for k in TOKENS]
    # The replica reports no usage, so its three events are counted.
    assert [after - was for after, was in zip(counted, tokens, strict=True)] == [1, 0, 1 + 3]
    assert await shared.metric("tidegate_requests_total", **labels) == before + 2
    assert await shared.metric("tidegate_ttft_seconds_count", model="alpha") == ttft + 1
    assert await served_streams(shared) == streams + 1
    assert await shared.metric("tidegate_in_flight", model="alpha") == 0


async def test_predicted_and_reported_cached_tokens_are_counted(shared: Stack) -> None:
    replica = await shared.serve("cached")
    details = {"cached_tokens": 16}
    usage = {"prompt_tokens": 40, "completion_tokens": 4, "prompt_tokens_details": details}
    last = {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": usage}
    replica.answer = stream(
        event("hi") * 4 + event(finish="stop") + b"data: %b\n\n" % json.dumps(last).encode() + DONE
    )

    async def counts() -> list[float]:
        names = {"predicted": "kind", "reported": "kind", "above": "sign", "below": "sign"}
        family = {
            "kind": "tidegate_cached_prompt_tokens_total",
            "sign": "tidegate_cached_prompt_tokens_error_total",
        }
        return [await shared.metric(family[k], model="alpha", **{k: name}) for name, k in names.items()]

    before = await counts()
    await shared.chat(stream=True)
    assert [after - was for after, was in zip(await counts(), before, strict=True)] == [0, 16, 0, 16]
    assert "made-up-name" not in (await shared.admin.get("/metrics")).text
