"""Requests of any mix that share a call get the same answers as alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.protocol import body as bodies
from gateway.protocol.body import MAX_DECODED
from gateway.protocol.body_batching import SubRequest, join, split, sub_request_of
from gateway.protocol.json_structure import JsonPieceReader
from gateway.protocol.paths import ROUTES
from policy.config.deployment import CoalesceConfig
from policy.types import Runner
from tests.serve.sim_driver import client_of, engine_of, spec

BOUNDS = CoalesceConfig(max_inputs=16, max_input_bytes=64)


def share(
    path: str, body: dict[str, Any] | bytes, tenant: str = "", bounds: CoalesceConfig = BOUNDS
) -> SubRequest | None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return sub_request_of(ROUTES[path], bodies.read(raw), raw, tenant, bounds)


def embedding(input_: Any, **more: Any) -> dict[str, Any]:
    return {"model": "base", "input": input_, **more}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", embedding("a" * 80)),
        ("/v1/embeddings", embedding(["a"] * 16)),
        ("/v1/embeddings", embedding([])),
        ("/v1/embeddings", embedding(["a", [1]])),
        ("/v1/embeddings", embedding([1, "a"])),
        ("/v1/embeddings", embedding([-1])),
        ("/v1/embeddings", embedding(None)),
        ("/v1/embeddings", embedding({"text": "a"})),
        ("/v1/embeddings", {"model": "base", "messages": []}),
        ("/v1/embeddings", embedding("a", stream=True)),
        ("/v1/completions", {"model": "base", "prompt": "a"}),
        ("/v1/completions", {"model": "base", "prompt": [1, 2]}),
        ("/v1/completions", {"model": "base", "prompt": ["a"], "n": 2}),
        ("/v1/completions", {"model": "base", "prompt": ["a"], "stream": True}),
        ("/v1/chat/completions", {"model": "base", "messages": []}),
        ("/v1/rerank", {"model": "base", "query": "a", "documents": ["b"]}),
        ("/v1/score", {"model": "base", "text_1": ["a", "b"], "text_2": ["c"]}),
        ("/v1/score", {"model": "base", "text_1": "a"}),
        ("/v1/score", {"model": "base", "text_1": [1], "text_2": [2]}),
    ],
)
def test_requests_that_cannot_share_a_call(path: str, body: dict[str, Any] | bytes) -> None:
    assert share(path, body) is None


def test_a_zero_window_disables_coalescing() -> None:
    assert share("/v1/embeddings", embedding("a"), bounds=CoalesceConfig(window_s=0)) is None


def test_requests_that_differ_only_in_input_form_a_group() -> None:
    def group(body: dict[str, Any] | bytes, tenant: str = "") -> object:
        found = share("/v1/embeddings", body, tenant)
        assert found is not None
        return found.group

    plain = group(embedding("a"))
    assert group(embedding(["b", "c"])) == plain
    assert group(b'{ "input" : "x" ,\n"model":"base"}') == plain
    others = [
        group(embedding("a", dimensions=8)),
        group(embedding("a", user="u")),
        group({"model": "sql", "input": "a"}),
        group(embedding("a"), "acme"),
        group(embedding([1])),
        group(b'{"model":"base","input":"a","dimensions": 8.0}'),
    ]
    assert len({plain, *others}) == 7


def test_inputs_are_copied_without_decoding() -> None:
    one = share("/v1/embeddings", b'{"model":"base","input":"\\u00e9 \\/ \xc3\xa9"}')
    other = share("/v1/embeddings", b'{"input":["1", "2"],"model":"base"}')
    assert one is not None
    assert other is not None
    assert join([one, other]) == b'{"model":"base","input":["\\u00e9 \\/ \xc3\xa9","1","2"]}'


def two() -> list[SubRequest]:
    shares = [share("/v1/embeddings", embedding(texts)) for texts in (["aaa"], ["b", "c"])]
    return [found for found in shares if found is not None]


def item(index: Any) -> dict[str, Any]:
    return {"index": index, "embedding": [float(index)]}


@pytest.mark.parametrize("indent", [None, MAX_DECODED // 32])
async def test_an_answer_is_split_by_index_in_any_order(indent: int | None) -> None:
    """A large one is read in pieces."""
    answer = {"id": "embd-SHARED", "data": [item(2), item(0), item(1)], "usage": {"prompt_tokens": 9}}
    whole = json.dumps(answer, indent=indent).encode()
    parts = await split(whole, two(), b"SHARED", [b"one", b"other"], JsonPieceReader())
    one, other = map(json.loads, parts)
    assert one == {"id": "embd-one", "data": [item(0)], "usage": {"prompt_tokens": 4}}
    assert other["id"] == "embd-other"
    assert [entry["embedding"] for entry in other["data"]] == [[1.0], [2.0]]
    assert [entry["index"] for entry in other["data"]] == [0, 1]
    assert other["usage"] == {"prompt_tokens": 5}


@pytest.mark.parametrize("usage", [..., None])
async def test_an_answer_without_usage_is_split_without(usage: Any) -> None:
    answer: dict[str, Any] = {"data": [item(0), item(1), item(2)]}
    if usage is not ...:
        answer["usage"] = usage
    parts = await split(json.dumps(answer).encode(), two(), b"S", [b"o", b"t"], JsonPieceReader())
    for part in map(json.loads, parts):
        assert set(part) == set(answer)
        assert part.get("usage") is None


DATA: tuple[Any, ...] = (
    *(
        [item(0), item(1), *more]
        for more in ([], [item(1)], [item(2)] * 2, [item(3)], [{"embedding": [2.0]}], [2])
    ),
    "three",
    None,
)


@pytest.mark.parametrize(
    "answer",
    [*(json.dumps({"data": data}).encode() for data in DATA), b"", b"[]", b"{}", b'{"data":[', b"\xff"],
)
async def test_an_answer_that_does_not_fit_is_not_split(answer: bytes) -> None:
    with pytest.raises(ValueError):
        await split(answer, two(), b"S", [b"o", b"t"], JsonPieceReader())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pooling() -> AsyncIterator[httpx.AsyncClient]:
    async with engine_of(spec(runner=Runner.POOLING)) as engine, client_of(engine) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def writing() -> AsyncIterator[httpx.AsyncClient]:
    async with engine_of(spec()) as engine, client_of(engine) as client:
        yield client


async def ask(client: httpx.AsyncClient, path: str, body: bytes, id_: str) -> bytes:
    answer = await client.post(path, content=body, headers={"x-request-id": id_})
    assert answer.status_code == 200, answer.text
    return answer.content


async def same_as_alone(client: httpx.AsyncClient, path: str, bodies_: list[dict[str, Any]]) -> None:
    shares = [found for body in bodies_ if (found := share(path, body)) is not None]
    assert len(shares) == len(bodies_)
    whole = await ask(client, path, join(shares), "shared")
    ids = [f"own-{i}".encode() for i in range(len(bodies_))]
    parts = [
        msgspec.json.decode(part) for part in await split(whole, shares, b"shared", ids, JsonPieceReader())
    ]
    used = [part.pop("usage") for part in parts]
    spent = msgspec.json.decode(whole)["usage"]
    for name in used[0]:
        assert sum(usage[name] for usage in used) == spent[name]
    for place, (part, body) in enumerate(zip(parts, bodies_, strict=True)):
        alone = msgspec.json.decode(await ask(client, path, json.dumps(body).encode(), f"own-{place}"))
        usage = alone.pop("usage")
        assert set(used[place]) == {name for name in usage if isinstance(usage[name], int)}
        part.pop("created"), alone.pop("created")
        assert part == alone


words = st.lists(st.sampled_from(["tide", "gate", "é", "sea", "\\", '"', "\n"]), min_size=1, max_size=4).map(
    " ".join
)
tokens = st.lists(st.integers(0, 500), min_size=1, max_size=4)


def several(each: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(each, min_size=2, max_size=4)


def one_or_more(inputs: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(inputs, st.lists(inputs, min_size=1, max_size=3))


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    texts=several(one_or_more(words).map(partial(embedding, dimensions=4))),
    ids=several(one_or_more(tokens).map(partial(embedding, encoding_format="base64"))),
    scores=several(
        st.tuples(one_or_more(words), st.lists(words, min_size=1, max_size=3)).map(
            lambda pair: {
                "model": "base",
                "text_1": pair[1] if isinstance(pair[0], list) else pair[0],
                "text_2": pair[1],
            }
        )
    ),
    prompts=several(
        st.lists(words, min_size=1, max_size=3).map(
            lambda each: {"model": "base", "prompt": each, "max_tokens": 5, "seed": 1}
        )
    ),
)
async def test_a_shared_call_answers_each_as_if_alone(
    pooling: httpx.AsyncClient,
    writing: httpx.AsyncClient,
    *,
    texts: list[Any],
    ids: list[Any],
    scores: list[Any],
    prompts: list[Any],
) -> None:
    await same_as_alone(pooling, "/v1/embeddings", texts)
    await same_as_alone(pooling, "/v1/embeddings", ids)
    await same_as_alone(pooling, "/v1/score", scores)
    await same_as_alone(writing, "/v1/completions", prompts)
