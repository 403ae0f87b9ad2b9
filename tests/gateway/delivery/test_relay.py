"""Bytes go through as they come, a cut never looks like an end, and a leaver frees its slot."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest

from tests.gateway.fake_replica import (
    ANSWER,
    DONE,
    STREAM,
    Exchange,
    FakeReplica,
    answer_json,
    event,
    forever,
    hold,
    stream,
)
from tests.gateway.worker import PATIENCE_S, RawClient, Stack, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}
OK = event("a") + event(finish="stop")


async def one(shared: Stack, name: str) -> FakeReplica:
    replica = await shared.replica(name)
    await shared.ready(replica)
    return replica


def errors(text: str) -> list[dict[str, object]]:
    return [
        json.loads(line[6:])["error"]
        for line in text.splitlines()
        if line.startswith("data: {") and "error" in json.loads(line[6:])
    ]


async def test_an_answer_is_the_bytes_that_came(shared: Stack) -> None:
    replica = await one(shared, "identity")
    answer = await shared.chat()
    assert answer.status_code == 200
    assert answer.content == ANSWER
    assert answer.headers["content-length"] == str(len(ANSWER))
    assert answer.headers["x-tidegate-replica"] == "identity"
    assert answer.headers["x-request-id"]
    assert replica.hits[0].json == CHAT


async def test_a_stream_is_the_bytes_that_came(shared: Stack) -> None:
    await one(shared, "stream")
    answer = await shared.chat(stream=True)
    assert answer.content == STREAM
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_events_split_anywhere_come_out_whole(shared: Stack, piece: int, newline: bytes) -> None:
    replica = await one(shared, f"split-{piece}-{len(newline)}")
    data = (b": keep-alive\n\n" + STREAM).replace(b"\n", newline)
    replica.answer = stream(data, piece=piece)
    assert (await shared.chat(stream=True)).content == data


async def test_the_first_event_does_not_wait_for_the_second(shared: Stack) -> None:
    replica = await one(shared, "prompt")
    replica.answer = forever
    async with shared.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        async for chunk in answer.aiter_raw():
            assert chunk == event("x")
            break


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (event("a"), event("a")),
        (event("a") + DONE, event("a")),
        (event("a") + event("half")[:20], event("a")),
        (OK[:-1], event("a")),
        (event("a") + b'data: {"error": {"message": "boom", "code": 500}}\n\n' + DONE, event("a")),
    ],
    ids=["end", "done", "half an event", "half the last event", "error then done"],
)
async def test_a_stream_without_its_finish_ends_in_one_error(shared: Stack, data: bytes, kept: bytes) -> None:
    replica = await one(shared, f"unfinished-{len(data)}")
    replica.answer = stream(data)
    answer = await shared.chat(stream=True)
    assert answer.content.startswith(kept)
    assert len(errors(answer.text)) == 1
    assert errors(answer.text)[0]["code"] == "stream_broken"
    assert "[DONE]" not in answer.text


async def test_every_choice_needs_its_finish(shared: Stack) -> None:
    replica = await one(shared, "choices")
    replica.answer = stream(OK + DONE)
    assert len(errors((await shared.chat(stream=True, n=2)).text)) == 1
    both = OK + event("b", index=1) + event(finish="length", index=1) + DONE
    replica.answer = stream(both)
    assert (await shared.chat(stream=True, n=2)).content == both


async def test_what_follows_done_is_cut(shared: Stack) -> None:
    replica = await one(shared, "after-done")
    replica.answer = stream(OK + DONE + event("more"))
    assert (await shared.chat(stream=True)).content == OK + DONE


@pytest.mark.parametrize("reset", [False, True])
async def test_a_stream_that_breaks_ends_in_an_error(shared: Stack, reset: bool) -> None:
    replica = await one(shared, f"broken-{reset}")
    sent = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await exchange.head("text/event-stream")
        await exchange.chunk(event("a"))
        await sent.wait()
        if reset:
            exchange.reset()
        else:
            exchange.close()

    replica.answer = answer
    received = b""
    async with shared.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
        async for chunk in reply.aiter_raw():
            received += chunk
            sent.set()
    assert received.startswith(event("a"))
    assert len(errors(received.decode())) == 1
    assert len(replica.hits) == 1


@pytest.mark.parametrize("size", [8, 5 * 1024 * 1024], ids=["held", "too long to be held"])
async def test_an_answer_that_breaks_in_its_middle(shared: Stack, size: int) -> None:
    """What was held is had elsewhere; what went out already ends with its connection."""
    replica = await one(shared, f"broken-json-{size}")

    async def answer(exchange: Exchange) -> None:
        replica.answer = answer_json
        await exchange.head("application/json", length=3 * size)
        await exchange.write(b'{"half":' + b" " * size)
        exchange.close()

    replica.answer = answer
    if size == 8:
        assert (await shared.chat()).content == ANSWER
    else:
        with pytest.raises(httpx.RemoteProtocolError):
            await shared.chat()


@pytest.mark.parametrize(
    ("path", "data", "ends"),
    [
        ("/v1/responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n', True),
        ("/v1/responses", b'event: response.created\ndata: {"type":"response.created"}\n\n', False),
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        ("/v1/messages", b'event: message_start\ndata: {"type":"message_start"}\n\n', False),
    ],
)
async def test_each_api_has_its_own_last_word(shared: Stack, path: str, data: bytes, ends: bool) -> None:
    replica = await one(shared, f"last-word-{len(data)}")
    replica.answer = stream(data)
    answer = await shared.http.post(path, json={"model": "alpha", "stream": True})
    assert answer.content.startswith(data)
    assert (answer.content == data) is ends
    assert ("event: error" in answer.text) is not ends


async def test_leaving_a_stream_closes_the_replica_connection(shared: Stack) -> None:
    replica = await one(shared, "leave-stream")
    replica.answer = forever
    client = await RawClient.post(shared.url, "/v1/chat/completions", {**CHAT, "stream": True})
    await client.reader.readuntil(b"\n\n")
    await client.leave()
    await asyncio.wait_for(replica.hits[0].gone.wait(), PATIENCE_S)


async def test_leaving_before_the_answer_closes_the_replica_connection(shared: Stack) -> None:
    replica = await one(shared, "leave-early")
    replica.answer = hold(asyncio.Event())
    client = await RawClient.post(shared.url, "/v1/chat/completions", CHAT)
    await until(lambda: bool(replica.hits))
    await client.leave()
    await asyncio.wait_for(replica.hits[0].gone.wait(), PATIENCE_S)


async def test_a_client_that_does_not_read_holds_its_replica_back(shared: Stack) -> None:
    replica = await one(shared, "slow-reader")
    sent = 0
    block = event("y" * 60_000)

    async def answer(exchange: Exchange) -> None:
        nonlocal sent
        transport = exchange._connection.transport
        await exchange.head("text/event-stream")
        while not exchange.gone.is_set():
            if transport.get_write_buffer_size() < 100_000:
                await exchange.chunk(block)
                sent += len(block)
            await asyncio.sleep(0.001)

    replica.answer = answer
    client = await RawClient.post(shared.url, "/v1/chat/completions", {**CHAT, "stream": True})
    transport = client.reader._transport  # type: ignore[attr-defined]
    transport.pause_reading()
    seen = -1

    async def stands_still() -> bool:
        nonlocal seen
        before, seen = seen, sent
        await asyncio.sleep(0.2)
        return before == sent > 0

    await until(stands_still)
    assert sent < 64 * 1024 * 1024  # kernel buffers on both sides, and a bounded one between
    others = await shared.replica("beside-slow-reader")
    await shared.ready(replica, others)
    others_answer = await shared.chat()
    assert others_answer.status_code == 200
    await client.leave()
    await asyncio.wait_for(replica.hits[0].gone.wait(), PATIENCE_S)


async def test_clients_that_leave_at_any_moment_leak_nothing(shared: Stack) -> None:
    rng = random.Random(7)  # noqa: S311 - moments, not secrets
    replica = await shared.replica("leavers", bound=20)

    async def answer(exchange: Exchange) -> None:
        await asyncio.sleep(rng.uniform(0, 0.02))
        await exchange.head("text/event-stream")
        for _ in range(rng.randint(1, 5)):
            await exchange.chunk(event("x"))
            await asyncio.sleep(rng.uniform(0, 0.01))
        await exchange.chunk(event(finish="stop") + DONE)
        await exchange.end()

    replica.answer = answer
    await shared.ready(replica)

    async def visit() -> None:
        client = await RawClient.post(shared.url, "/v1/chat/completions", {**CHAT, "stream": True})
        await asyncio.sleep(rng.uniform(0, 0.1))
        await client.leave()

    await asyncio.gather(*(visit() for _ in range(200)))

    async def idle() -> bool:
        seen = (await shared.admin.get("/admin/fleet")).json()["replicas"][0]
        return (
            seen["mine"] == 0
            and await shared.metric("tidegate_in_flight", model="alpha") == 0
            and await shared.metric("tidegate_queue_depth", model="alpha") == 0
        )

    await until(idle)
    assert (await shared.chat(stream=True)).content.endswith(DONE)
