"""Bytes are relayed unchanged, a truncation never looks like an end, and a disconnect frees its slot."""

from __future__ import annotations

import json

import httpx
import pytest

from policy.wire.headers import ENGINE_TIME_HEADER
from tests.gateway.fake_replica import (
    ANSWER,
    DONE,
    Exchange,
    answer_json,
    event,
    forever,
    stream,
)
from tests.gateway.worker import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
CHAT = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}
OK = event("a") + event(finish="stop")


def errors(text: str) -> list[dict[str, object]]:
    return [
        json.loads(line[6:])["error"]
        for line in text.splitlines()
        if line.startswith("data: {") and "error" in json.loads(line[6:])
    ]


async def test_an_answer_is_relayed_byte_for_byte(shared: Stack) -> None:
    replica = await shared.serve("identity")
    answer = await shared.chat()
    assert answer.status_code == 200
    assert answer.content == ANSWER
    assert answer.headers["content-length"] == str(len(ANSWER))
    assert answer.headers["x-tidegate-replica"] == "identity"
    assert answer.headers["x-request-id"]
    assert replica.hits[0].json == CHAT


@pytest.mark.parametrize(("stream", "status"), [(False, 200), (True, 200), (False, 400), (False, 500)])
async def test_no_header_of_a_replica_reaches_a_client(shared: Stack, stream: bool, status: int) -> None:
    replica = await shared.serve("headers")

    async def answer(exchange: Exchange) -> None:
        kind = "text/event-stream; boundary=x" if stream else "application/json; x=/etc/passwd"
        body = OK + DONE if stream else b"{}"
        secrets = {
            "set_cookie": "a=b",
            "server": "uvicorn",
            "x_request_id": "theirs",
            "location": "http://10.0.0.1",
        }
        await exchange.reply(body, status=status, content_type=kind, **secrets)

    replica.answer = answer
    got = await shared.chat(stream=stream)
    assert got.status_code == (502 if status == 500 else status)
    names = {
        "date",
        "content-length",
        "content-type",
        "x-request-id",
        "x-tidegate-replica",
        "transfer-encoding",
    }
    assert set(got.headers) - names == ({"cache-control", "x-accel-buffering"} if stream else set())
    assert got.headers["content-type"] == (
        "text/event-stream; charset=utf-8" if stream else "application/json"
    )
    assert got.headers["x-request-id"] != "theirs"


async def test_the_first_event_does_not_wait_for_the_second(shared: Stack) -> None:
    replica = await shared.serve("prompt")
    replica.answer = forever
    async with shared.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        async for chunk in answer.aiter_raw():
            assert chunk == event("x")
            break


async def test_every_choice_needs_a_finish_reason(shared: Stack) -> None:
    replica = await shared.serve("choices")
    replica.answer = stream(OK + DONE)
    assert len(errors((await shared.chat(stream=True, n=2)).text)) == 1
    both = OK + event("b", index=1) + event(finish="length", index=1) + DONE
    replica.answer = stream(both)
    assert (await shared.chat(stream=True, n=2)).content == both


@pytest.mark.parametrize("how", ["with the last event", "alone", "with the end", "not at all"])
async def test_the_engines_times_are_no_part_of_the_answer(shared: Stack, how: str) -> None:
    replica = await shared.serve("timed", frames=False)
    likewise = event(f"\\n: {ENGINE_TIME_HEADER} 9")  # an answer may be about it
    times = f": {ENGINE_TIME_HEADER} 0.5\n\n".encode() if how != "not at all" else b""

    async def answer(exchange: Exchange) -> None:
        await exchange.head("text/event-stream", x_tidegate_engine_s="0.25")
        await exchange.chunk(event("a") + event(finish="stop"))
        await exchange.chunk(likewise + DONE + (times if how == "with the last event" else b""))
        if how == "with the end":
            await exchange.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(times), times))
            return
        if how == "alone":
            await exchange.chunk(times)
        await exchange.end()

    replica.answer = answer
    got = await shared.chat(stream=True)
    assert got.content == event("a") + event(finish="stop") + likewise + DONE
    assert ENGINE_TIME_HEADER not in got.headers
    assert replica.hits[0].headers[ENGINE_TIME_HEADER]


@pytest.mark.parametrize("size", [8, 5 * 1024 * 1024], ids=["held", "too long to be held"])
async def test_a_truncated_answer_is_retried_or_closes_the_connection(shared: Stack, size: int) -> None:
    """A held answer is retried; one that was partly sent ends with its connection."""
    replica = await shared.serve(f"broken-json-{size}", frames=False)

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
