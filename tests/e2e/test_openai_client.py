"""What users of the official OpenAI client get from a real model: answers, streams and exception classes."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.conftest import CHAT, POOLING
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600, func_only=True)]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = "1, 2, 3, 4, 5, 6,"


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.base_url, api_key="unused", max_retries=0, timeout=300) as client:
        yield client


async def test_the_async_client_streams_several_at_once(stack: Stack) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        parts = await client.chat.completions.create(
            model=CHAT, messages=QUESTION, temperature=0, max_completion_tokens=16, stream=True
        )
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="unused", max_retries=0) as client:
        answers = await asyncio.gather(*(ask(client) for _ in range(3)))
    assert all("Paris" in answer for answer in answers)


def test_a_completion_stops_before_its_stop_sequence(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=CHAT, prompt=COUNT, temperature=0, max_tokens=16, stop=["9"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" 7, 8, ", "stop")
    parts = client.completions.create(
        model=CHAT, prompt=COUNT, temperature=0, max_tokens=16, stop=["9"], stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == " 7, 8, "


def test_every_choice_of_several_is_finished(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=CHAT, messages=QUESTION, n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.finish_reason for choice in answer.choices)
    parts = client.completions.create(model=CHAT, prompt=["a b c", COUNT], n=2, max_tokens=3, stream=True)
    reasons = {choice.index: choice.finish_reason for part in parts for choice in part.choices}
    assert reasons == dict.fromkeys(range(4), "length")


def test_usage_is_the_last_chunk_of_a_stream(client: openai.OpenAI) -> None:
    *parts, last = client.chat.completions.create(
        model=CHAT, messages=QUESTION, n=2, max_tokens=3, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert {choice.index for part in parts for choice in part.choices if choice.finish_reason} == {0, 1}
    assert all(part.usage is None for part in parts)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 6


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    millions: int = Field(ge=1, le=9)


def test_a_response_follows_its_json_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=CHAT, messages=QUESTION, temperature=0, max_tokens=60, response_format=City
    )
    assert answer.choices[0].message.parsed is not None
    assert answer.choices[0].message.parsed.name == "Paris"
    response = client.responses.parse(
        model=CHAT, input="Name a city.", temperature=0, max_output_tokens=60, text_format=City
    )
    assert isinstance(response.output_parsed, City)


def test_a_pooling_model_embeds_texts(client: openai.OpenAI) -> None:
    texts = ["The cat sat on the mat.", "A cat is sitting on the mat.", "Quarterly tax revenue rose."]
    # By default the client requests base64 and decodes it.
    packed = client.embeddings.create(model=POOLING, input=texts).data
    plain = client.embeddings.create(model=POOLING, input=texts, encoding_format="float").data
    cat, same, tax = (vector.embedding for vector in plain)
    assert len(cat) == 576
    assert math.hypot(*cat) == pytest.approx(1.0, abs=1e-3)
    assert dot(cat, same) > dot(cat, tax) + 0.05
    assert [vector.embedding for vector in packed] == [pytest.approx(v.embedding, abs=1e-5) for v in plain]


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_a_pooling_model_scores_and_ranks(stack: Stack) -> None:
    query, documents = "A cat is sitting on the mat.", ["Tax revenue rose.", "The cat sat on the mat."]
    scored = stack.http.post(
        f"{stack.base_url}/score", json={"model": POOLING, "text_1": query, "text_2": documents}
    ).json()["data"]
    ranked = stack.http.post(
        f"{stack.base_url}/rerank", json={"model": POOLING, "query": query, "documents": documents}
    ).json()["results"]
    assert [result["index"] for result in ranked] == [1, 0]
    assert ranked[0]["document"]["text"] == documents[1]
    assert [scored[1]["score"], scored[0]["score"]] == pytest.approx([r["relevance_score"] for r in ranked])


@pytest.mark.parametrize("model", [CHAT, POOLING])
def test_text_is_tokenized_and_detokenized(stack: Stack, model: str) -> None:
    text = "Grüße, world: 1 + 1 = 2"
    received = stack.http.post(f"{stack.base_url}/tokenize", json={"model": model, "prompt": text}).json()
    assert received["count"] == len(received["tokens"]) > 5
    back = {"model": model, "tokens": received["tokens"]}
    assert stack.http.post(f"{stack.base_url}/detokenize", json=back).json() == {"prompt": text}


def test_a_response_and_its_stream(client: openai.OpenAI) -> None:
    question = QUESTION[0]["content"]
    answer = client.responses.create(model=CHAT, input=question, temperature=0, max_output_tokens=16)
    assert "Paris" in answer.output_text
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens > 0
    with client.responses.stream(model=CHAT, input=question, temperature=0, max_output_tokens=16) as events:
        received = list(events)
        assert events.get_final_response().output_text == answer.output_text
    assert (received[0].type, received[-1].type) == ("response.created", "response.completed")
    deltas = [event.delta for event in received if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text
    cut = client.responses.create(model=CHAT, input=question, temperature=0, max_output_tokens=2)
    assert cut.status == "incomplete"


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    listed = client.models.list()
    assert [entry.id for entry in listed.data] == [CHAT, POOLING]
    for entry in listed.data:
        assert (entry.object, entry.owned_by) == ("model", "tidegate")
        assert client.models.retrieve(entry.id) == entry
    # The list does not name the path of the weights.
    assert "/" not in listed.to_json()


BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"messages": [{"role": "user", "content": "cat " * 3000}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", None),
        ({"max_completion_tokens": 100_000}, "max_completion_tokens", None),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", None),
        ({"response_format": BAD_SCHEMA}, None, None),
        ({"response_format": {"type": "odd"}}, "response_format.type", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_vllm_refuses_is_a_bad_request(
    client: openai.OpenAI, change: dict[str, Any], param: str | None, code: str | None, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=CHAT,
            messages=QUESTION,
            stream=stream,
            extra_body=change,
            extra_headers={"x-request-id": "bad-chat"},
        )
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id == "bad-chat"
    error = caught.value.response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not re.search(r"(?<![\w/])/(?!v1/)[\w.-]+/[\w.-]+|Traceback|\.py", error["message"])
