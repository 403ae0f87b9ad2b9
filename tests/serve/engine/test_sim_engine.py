"""The simulated engine answers as vLLM does: fields, order, finish reasons, usage and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from policy.config.deployment import SimConfig
from policy.errors import ConfigError, EngineFailed
from serve.engine.interface import Engine
from serve.engine.sim.engine import create
from tests.serve.sim_driver import client_of, engine_of, events_of, spec

CHAT = {"model": "base", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with engine_of(spec()) as engine:
        yield engine


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(engine) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_chat_answer_has_exactly_the_tokens_asked_for(client: httpx.AsyncClient) -> None:
    body = await post(client, "/v1/chat/completions", **CHAT, max_tokens=12)
    (choice,) = body["choices"]
    assert (body["object"], body["model"]) == ("chat.completion", "base")
    assert choice["finish_reason"] == "length"
    tokenized = await post(client, "/tokenize", prompt=choice["message"]["content"])
    prompt = await post(client, "/tokenize", messages=CHAT["messages"])
    assert tokenized["count"] == 12
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == prompt["count"]
    assert body["usage"]["total_tokens"] == 12 + prompt["count"]


async def test_a_stream_equals_the_whole_answer_with_one_event_per_token(client: httpx.AsyncClient) -> None:
    whole = await post(client, "/v1/chat/completions", **CHAT, max_tokens=9, n=2)
    asked = {**CHAT, "max_tokens": 9, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post("/v1/chat/completions", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events_of(answer.text)
    assert done == "[DONE]"
    # Asked again, the one whole block of the prompt is cached.
    assert whole["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
    assert usage["usage"].pop("prompt_tokens_details") == {"cached_tokens": 16}
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert usage["usage"]["completion_tokens"] == 18
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert len(choices) == 1 + 9
        text = "".join(choice["delta"]["content"] for choice in choices)
        assert text == whole["choices"][index]["message"]["content"]
        assert [choice["finish_reason"] for choice in choices] == [None] * 9 + ["length"]


async def test_without_max_tokens_a_chat_ends_unless_eos_is_ignored(client: httpx.AsyncClient) -> None:
    body = await post(client, "/v1/chat/completions", **CHAT)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert 16 <= body["usage"]["completion_tokens"] <= 256
    body = await post(client, "/v1/chat/completions", **CHAT, ignore_eos=True)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 512


async def test_a_stop_sequence_ends_the_text_before_it(client: httpx.AsyncClient) -> None:
    ask = {"model": "base", "prompt": "Once", "max_tokens": 20}
    text = (await post(client, "/v1/completions", **ask))["choices"][0]["text"]
    stop = text[30:36]
    body = await post(client, "/v1/completions", **ask, stop=[stop, "never generated"])
    (choice,) = body["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert body["usage"]["completion_tokens"] < 20
    streamed = await client.post("/v1/completions", json={**ask, "stop": stop, "stream": True})
    *chunks, _ = events_of(streamed.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_text_depends_on_seeds_model_and_prompt_only() -> None:
    async def text(engine_seed: int, **body: Any) -> str:
        async with engine_of(spec(seed=engine_seed)) as engine, client_of(engine) as client:
            answer = await post(client, "/v1/completions", **{"prompt": "A tide", **body})
            return str(answer["choices"][0]["text"])

    first = await text(1, seed=7)
    assert await text(1, seed=7) == first
    others = [await text(2, seed=7), await text(1, seed=8), await text(1, seed=7, model="sql")]
    others.append(await text(1, seed=7, prompt="A gate"))
    assert len({first, *others}) == 5


async def test_completions_take_several_prompts_and_token_ids(client: httpx.AsyncClient) -> None:
    text = "The tide comes in. \N{WATER WAVE} 潮"
    ids = (await post(client, "/tokenize", prompt=text))["tokens"]
    assert (await post(client, "/detokenize", tokens=ids))["prompt"] == text
    body = await post(client, "/v1/completions", prompt=[ids, ids[:1]], max_tokens=3, n=2, echo=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"].startswith(text) for choice in body["choices"]] == [True, True, False, False]
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == len(ids) + 1


async def test_logprobs_come_for_every_token(client: httpx.AsyncClient) -> None:
    chat = await post(client, "/v1/chat/completions", **CHAT, max_tokens=4, logprobs=True, top_logprobs=3)
    content = chat["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == chat["choices"][0]["message"]["content"]
    for entry in content:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert tops[0] == entry["logprob"] < 0
    plain = (await post(client, "/v1/completions", prompt="x", max_tokens=4, logprobs=2))["choices"][0]
    assert "".join(plain["logprobs"]["tokens"]) == plain["text"]
    assert plain["logprobs"]["text_offset"][1] == len(plain["logprobs"]["tokens"][0])


async def test_models_list_the_base_and_its_adapters(client: httpx.AsyncClient, engine: Engine) -> None:
    base, adapter = (await client.get("/v1/models")).json()["data"]
    assert (base["id"], base["parent"], base["max_model_len"]) == ("base", None, 512)
    assert (adapter["id"], adapter["parent"]) == ("sql", "base")
    assert engine.adapters() == ("sql",)
    assert (await post(client, "/v1/completions", model="sql", prompt="x"))["model"] == "sql"


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"{", 400, None),
        (b"\xff", 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"messages": "hi"}', 400, "messages"),
        (b'{"messages": []}', 400, "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}', 400, "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', 400, "max_tokens"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": true}}',
            400,
            "stream_options",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "model": "nope"}', 404, "model"),
        (b'{"messages": [{"role": "user", "content": "' + b"x " * 512 + b'"}]}', 400, "input_tokens"),
    ],
)
async def test_an_invalid_chat_request_has_the_error_code_and_parameter_of_vllm(
    client: httpx.AsyncClient, content: bytes, status: int, param: str | None
) -> None:
    answer = await client.post("/v1/chat/completions", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, status, param)
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]
    assert error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [10**9]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [10**9]]}, "prompt"),
        ("/v1/completions", {"prompt": [262_143]}, ""),
        ("/v1/completions", {"prompt": [True]}, ""),
        ("/v1/completions", {"prompt": [[True], [2]]}, ""),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"999999": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [10**9]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": [10**9]}, "allowed_token_ids"),
        ("/v1/completions", {"prompt": "x", "logprobs": "2"}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "logprobs": 2, "max_tokens": "3"}, ""),
        ("/detokenize", {"tokens": [1, 10**9]}, ""),
    ],
)
async def test_token_ids_and_numbers_are_taken_as_by_vllm(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    """An id is known if it is of this tokenizer or could be of a published one."""
    answer = await client.post(path, json=body)
    refused = answer.json().get("error", {"param": ""})["param"]
    assert (answer.status_code, refused) == (400 if param else 200, param)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/files"])
async def test_a_generating_model_has_no_pooling_routes(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, json={"input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)


@pytest.mark.parametrize(
    ("engine_args", "reason"),
    [
        ({"max_num_seqs": "many"}, "engine_args: .*max_num_seqs"),
        ({"max_model_len": 512, "num_gpu_blocks_override": 8}, "larger than the 128 tokens"),
    ],
)
async def test_invalid_engine_arguments_are_refused(engine_args: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineFailed, match=reason):
        await create(spec(**engine_args))


async def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sim\.profile"):
        await create(msgspec.structs.replace(spec(), sim=SimConfig(profile="abacus")))
