"""The official clients read the simulated engine's answers, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import httpx2
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from policy.types import Runner
from tests.serve.sim_driver import client_of, engine_of, spec


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with engine_of(spec()) as engine, client_of(engine) as client:
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(api_key="none", base_url="http://engine/v1", http_client=http, max_retries=0)


@pytest.fixture
async def anthropic() -> AsyncIterator[AsyncAnthropic]:
    async with engine_of(spec()) as engine:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(engine.app))  # type: ignore[arg-type]
        async with http:
            yield AsyncAnthropic(api_key="none", base_url="http://engine", http_client=http, max_retries=0)


async def test_openai_chat(client: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    whole = await client.chat.completions.create(model="base", messages=messages, max_tokens=6)  # type: ignore[call-overload]
    stream = await client.chat.completions.create(  # type: ignore[call-overload]
        model="base", messages=messages, max_tokens=6, stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize(("limit", "status"), [(6, "incomplete"), (None, "completed")])
async def test_openai_responses(client: AsyncOpenAI, limit: int | None, status: str) -> None:
    bound = openai.omit if limit is None else limit
    whole = await client.responses.create(model="base", input="Hello", max_output_tokens=bound)
    assert whole.status == status
    events = [
        event
        async for event in await client.responses.create(
            model="base", input="Hello", max_output_tokens=bound, stream=True
        )
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert whole.usage is not None
    assert deltas == whole.usage.output_tokens
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    last = events[-1]
    assert last.type == "response.completed"
    assert (last.response.status, last.response.output_text) == (status, whole.output_text)


async def test_openai_errors_are_the_right_classes(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        await client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model="base", prompt="x " * 600)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(model="base", input="x", previous_response_id="resp_1")


async def test_openai_embeddings_in_base64_are_those_in_floats() -> None:
    async with engine_of(spec(runner=Runner.POOLING)) as engine, client_of(engine) as http:
        client = AsyncOpenAI(api_key="none", base_url="http://engine/v1", http_client=http)
        packed = await client.embeddings.create(model="base", input="sea")
        plain = await client.embeddings.create(model="base", input="sea", encoding_format="float")
        assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)


async def test_anthropic_messages(anthropic: AsyncAnthropic) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    whole = await anthropic.messages.create(  # type: ignore[call-overload]
        model="base", max_tokens=6, system="Be brief.", messages=messages
    )
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 6)
    async with anthropic.messages.stream(
        model="base",
        max_tokens=6,
        system="Be brief.",
        messages=messages,  # type: ignore[arg-type]
    ) as stream:
        text = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert text == whole.content[0].text
    assert final.usage == whole.usage
    stop = text.split()[2]
    stopped = await anthropic.messages.create(  # type: ignore[call-overload]
        model="base", max_tokens=6, system="Be brief.", messages=messages, stop_sequences=[stop]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
