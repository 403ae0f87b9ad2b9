"""The clients that users already have: answers, streams and exception classes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import anthropic
import openai
import pytest
import pytest_asyncio

from tests.gateway.fake_replica import DONE, Exchange, event, stream
from tests.gateway.worker import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(loop_scope="module")
async def client(shared: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def claude(shared: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=shared.url, api_key="unused", max_retries=0) as client:
        yield client


async def test_chat_and_its_stream(shared: Stack, client: openai.AsyncOpenAI) -> None:
    replica = await shared.replica("openai")
    await shared.ready(replica)
    answer = await client.chat.completions.create(model="alpha", messages=MESSAGES)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "Paris é"
    parts = await client.chat.completions.create(model="alpha", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
    text = "".join([part.choices[0].delta.content or "" async for part in parts])
    assert text.startswith("Paris ")
    assert [card.id async for card in client.models.list()] == ["alpha", "vectors"]
    assert (await client.models.retrieve("alpha")).id == "alpha"


async def test_each_refusal_raises_its_class(shared: Stack, client: openai.AsyncOpenAI) -> None:
    replica = await shared.replica("refusals")
    await shared.ready(replica)

    async def ask(**more: object) -> None:
        await client.chat.completions.create(**{"model": "alpha", "messages": MESSAGES, **more})  # type: ignore[call-overload]

    with pytest.raises(openai.NotFoundError) as missing:
        await ask(model="nobody")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await ask(n=99)
    with pytest.raises(openai.BadRequestError) as unsupported:
        await client.embeddings.create(model="alpha", input="x")
    assert "alpha" in unsupported.value.message
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")
    with pytest.raises(openai.InternalServerError):
        replica.say(state="draining")
        await shared.ready()
        await ask(extra_headers={"x-request-timeout-s": "0.05"})


async def test_a_broken_stream_raises(shared: Stack, client: openai.AsyncOpenAI) -> None:
    replica = await shared.replica("broken")
    replica.answer = stream(event("a") + DONE)
    await shared.ready(replica)
    parts = await client.chat.completions.create(model="alpha", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
    with pytest.raises(openai.APIError):
        async for _ in parts:
            pass
    created = {"type": "response.created", "sequence_number": 0, "response": {"id": "r"}}
    replica.answer = stream(b"event: response.created\ndata: " + json.dumps(created).encode() + b"\n\n")
    with pytest.raises(openai.APIError):
        async for _ in await client.responses.create(model="alpha", input="x", stream=True):
            pass


async def test_messages_and_their_stream(shared: Stack, claude: anthropic.AsyncAnthropic) -> None:
    replica = await shared.replica("anthropic")
    await shared.ready(replica)
    message = {
        "id": "m", "type": "message", "role": "assistant", "model": "alpha", "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": "Paris"}],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip

    async def whole(exchange: Exchange) -> None:
        await exchange.reply(json.dumps(message).encode())

    replica.answer = whole
    answer = await claude.messages.create(model="alpha", max_tokens=5, messages=MESSAGES)  # type: ignore[call-overload]
    assert answer.content[0].text == "Paris"
    assert answer._request_id

    def said(kind: str, **more: object) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()

    begun = said("message_start", message={**message, "content": [], "stop_reason": None})
    replica.answer = stream(begun + said("message_stop"))
    async with claude.messages.stream(model="alpha", max_tokens=5, messages=MESSAGES) as parts:  # type: ignore[arg-type]
        kinds = [part.type async for part in parts]
    assert kinds[-1] == "message_stop"

    replica.answer = stream(begun)
    with pytest.raises(anthropic.APIStatusError):
        async with claude.messages.stream(model="alpha", max_tokens=5, messages=MESSAGES) as parts:  # type: ignore[arg-type]
            async for _ in parts:
                pass
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.create(model="nobody", max_tokens=5, messages=MESSAGES)  # type: ignore[call-overload]
    assert missing.value.request_id
