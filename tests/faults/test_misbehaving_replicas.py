"""Replicas that misbehave, and answers that are nonsense: what has not begun is served elsewhere."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from policy.wire import frames
from tests.faults import faults
from tests.faults.faults import EVENTS
from tests.faults.harness import Harness
from tests.faults.raw_client import Reply
from tests.gateway.fake_replica import DONE, Answer, Exchange, FrameExchange, event, stream
from tests.gateway.worker import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
BOUND, CLIENTS = 4, 8
EJECTED_WITHIN_S = 10.0
GATEWAY = {
    "connect_timeout_s": 10.0,
    "first_token_timeout_s": 20.0,
    "answer_timeout_s": 3.0,
    "progress_timeout_s": 2.0,
    "queue_timeout_s": 60,
    "eject": {"base_s": 1.0},
}
GOOD = faults.paced(4, 0.01)


async def reset(exchange: Exchange) -> None:
    exchange.reset()


def records(*given: tuple[int, bytes]) -> Answer:
    """These records of frames in place of a response, by kind and payload."""

    async def answer(exchange: Exchange) -> None:
        assert isinstance(exchange, FrameExchange)
        for kind, payload in given:
            exchange.record(kind, payload)

    return answer


MISBEHAVIOUR: dict[str, list[Answer]] = {
    "429": [faults.status(429, retry_after="1")] * 4,
    "404": [faults.status(404, "The model does not exist.")] * 4,
    "500": [faults.status(500)] * 4,
    "silence": [faults.silent] * 4,
    "resets": [reset] * 4,
    "no frames": [records((200, b"")), records((frames.END, b"")), records((frames.HEAD, b"")), reset],
    "each another": [faults.status(429), faults.status(404), faults.silent, reset],
    "our secret is refused": [faults.status(401), faults.status(403)] * 2,
}


class ClosedLoop:
    """Clients that each send a stream after the other, until :meth:`end`."""

    def __init__(self, harness: Harness, model: str) -> None:
        self.replies: list[Reply] = []
        self._asks = True
        self._clients = [asyncio.create_task(self._ask(harness, model)) for _ in range(CLIENTS)]

    async def _ask(self, harness: Harness, model: str) -> None:
        while self._asks:
            self.replies.append(await harness.ask(model, stream=True))

    async def end(self) -> None:
        self._asks = False
        await asyncio.gather(*self._clients)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind == "no frames")) for kind in MISBEHAVIOUR]
)
async def test_four_of_five_replicas_misbehave_and_no_request_fails(
    way: str, harness: Harness, model: str, kind: str
) -> None:
    """They are ejected, the fifth is used to its bound, and they return once they answer a probe."""
    if kind == "no frames" and way != "frames":
        pytest.skip("over HTTP there are none")
    *bad, good = await harness.fleet(model, 5, usual=GOOD, bound=BOUND)
    for one, answer in zip(bad, MISBEHAVIOUR[kind], strict=True):
        one.usual = answer
    async with harness.expect(model) as after:
        load = ClosedLoop(harness, model)
        began = time.monotonic()
        for one in bad:
            await harness.out_of_rotation(one.id)
        assert time.monotonic() - began < EJECTED_WITHIN_S + after.stalls.seconds
        await until(lambda: len(good.open) == BOUND, "the good one is full")
        for one in bad:
            one.usual = GOOD
        await until(lambda: harness.admits({one.id for one in (*bad, good)}), "all are back")
        await load.end()
        outcomes = await after.outcomes()
        # What met two silent replicas before they were ejected may have begun on both: it is not tried again.
        lost = outcomes.pop("replica_lost", 0) if kind == "silence" else 0
        assert set(outcomes) == {"ok"}
        assert lost <= CLIENTS
    assert sum(reply.error is not None for reply in load.replies) == lost


def raw(data: bytes) -> Answer:
    """``data`` in place of a response, and the end of the connection."""

    async def answer(exchange: Exchange) -> None:
        await exchange.write(data)
        exchange.close()

    return answer


def flood(begin: bytes, part: bytes) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.write(begin)
        while not exchange.gone.is_set():
            await exchange.write(part)
            await asyncio.sleep(0)

    return answer


OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"content-type: application/json\r\n"
SSE = OK + b"content-type: text/event-stream\r\n"
NONSENSE: dict[str, Answer] = {
    "no HTTP": raw(b"hello\r\n\r\n"),
    "nothing": raw(b""),
    "a status line alone": raw(b"HTTP/1.1 200 OK\r\n"),
    "no status": raw(b"HTTP/1.1 abc OK\r\n\r\n"),
    "status 99": raw(b"HTTP/1.1 099 X\r\ncontent-length: 0\r\n\r\n"),
    "another protocol": raw(b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello"),
    "interim responses without end": flood(b"", b"HTTP/1.1 103 X\r\nlink: x\r\n\r\n" * 999),
    "a header without end": flood(OK + b"x: ", b"x" * 65536),
    "headers without end": flood(OK, b"x: y\r\n" * 9999),
    "no name of a header": raw(OK + b": x\r\ncontent-length: 2\r\n\r\n{}"),
    "two lengths": raw(JSON + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}"),
    "a negative length": raw(JSON + b"content-length: -2\r\n\r\n{}"),
    "a longer length": raw(JSON + b"content-length: 99\r\n\r\n{}"),
    "a chunk without a size": raw(SSE + b"transfer-encoding: chunked\r\n\r\nxyz\r\n\r\n"),
    "half a chunk": raw(SSE + b"transfer-encoding: chunked\r\n\r\nffff\r\ndata"),
    "another encoding": raw(JSON + b"transfer-encoding: gzip\r\n\r\n{}"),
    "a redirection": faults.status(302, location="http://127.0.0.1:1/"),
    "no content": faults.reply(b"", code=204),
    "another type": faults.reply(b"<html>", content_type="text/html"),
    "no type": raw(OK + b"content-length: 2\r\n\r\n{}"),
    "a list": faults.reply(b"[1]"),
    "null": faults.reply(b"null"),
    "deep JSON": faults.reply(b'{"a":' + b"[" * 100_000),
    "an error with status 200": faults.reply(b'{"error": {"message": "boom", "code": 500}}'),
    "an empty stream": faults.reply(b"", content_type=EVENTS),
    "the end alone": faults.reply(DONE, content_type=EVENTS),
    "comments alone": faults.reply(b": ping\n\n" * 3, content_type=EVENTS),
    "a comment, then no JSON": faults.reply(b": ping\n\ndata: oops\n\n", content_type=EVENTS),
    "a stream of no JSON": faults.reply(b"data: oops\n\n" * 3, content_type=EVENTS),
    "an event that is no text": faults.reply(b"data: \xff\n\n", content_type=EVENTS),
}


@pytest.mark.parametrize("kind", NONSENSE)
async def test_nonsense_before_the_first_event_is_had_elsewhere(
    harness: Harness, model: str, kind: str
) -> None:
    bad, _ = await harness.fleet(model, 2, frames=False)
    bad.usual = NONSENSE[kind]
    await harness.prefer(bad)
    async with harness.expect(model, {"ok": 2}, attempts=4):
        for stream in (True, False):
            reply = await harness.ask(model, stream=stream)
            assert (reply.status, reply.error, reply.streamed) == (200, None, stream)


HEAD = (frames.HEAD, frames.head(200, [(b"content-type", b"application/json")]))
# Of the answers above those that frames can carry, and what is no answer there.
FRAMED: dict[str, Answer] = {
    **dict(list(NONSENSE.items())[list(NONSENSE).index("no content") :]),
    "reset": records((frames.RESET, b"")),
    "a reset after the head": records(HEAD, (frames.RESET, b"")),
    "the end without a head": records((frames.END, b"{}")),
    "a body without a head": records((frames.DATA, b"{}")),
    "two heads": records(HEAD, HEAD),
    "a head without a status": records((frames.HEAD, b"")),
    "a header without a colon": records((frames.HEAD, frames.head(200, []) + b"x\r\n")),
    "status 99": records((frames.HEAD, frames.head(99, [])), (frames.END, b"{}")),
    "a kind of the other side": records((frames.WINDOW, frames.credit(5))),
    "an unknown kind": records((200, b"")),
    "thousands of empty parts": records(HEAD, *[(frames.DATA, b"")] * 5000, (frames.RESET, b"")),
}
del FRAMED["no type"]  # raw, as those before


IN_EVERY_RUN = ("the end without a head", "a header without a colon", "thousands of empty parts")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind not in IN_EVERY_RUN)) for kind in FRAMED]
)
async def test_nonsense_in_frames_is_had_elsewhere(way: str, harness: Harness, model: str, kind: str) -> None:
    if way != "frames":
        pytest.skip("nonsense over HTTP has a test of its own")
    bad, _ = await harness.fleet(model, 2)
    bad.usual = FRAMED[kind]
    await harness.prefer(bad)
    async with harness.expect(model, {"ok": 2}):
        for stream in (True, False):
            reply = await harness.ask(model, stream=stream)
            assert (reply.status, reply.error, reply.streamed) == (200, None, stream)


async def test_an_opened_stream_without_an_event_ends_in_an_error(harness: Harness, model: str) -> None:
    """The client got comments, which commit to nothing: what all replicas say comes as an event."""
    await harness.fleet(model, 2, usual=NONSENSE["comments alone"])
    async with harness.expect(model, {"upstream_failed": 3}, attempts=6):
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            reply = await harness.ask(model, path=path, stream=True)
            assert reply.status == 200 and reply.streamed
            assert reply.error is not None and reply.error["message"] == "The replica's stream is empty."


PREFIXES, EACH = 32, 4
LIES: dict[str, dict[str, Any]] = {
    "too few prompt tokens": {"prompt_tokens": 10, "completion_tokens": 4},
    "too many prompt tokens": {"prompt_tokens": 10**6, "completion_tokens": 4},
    "more cached than there are": {
        "prompt_tokens": 1000,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2000},
    },
    "negative": {"prompt_tokens": -1000, "completion_tokens": -4},
    "more output than allowed": {"prompt_tokens": 1000, "completion_tokens": 10**9},
}


def counting(usage: dict[str, Any], cold: list[str]) -> Answer:
    """A replica with a prefix cache and this usage in its answers, which notes cold prefixes."""
    cached: set[str] = set()

    async def answer(exchange: Exchange) -> None:
        prefix = exchange.json["messages"][-1]["content"][:8]
        if prefix not in cached:
            cold.append(prefix)
            cached.add(prefix)
            await asyncio.sleep(0.02)
        last = {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": usage}
        data = faults.tokens(4) + event(finish="stop") + b"data: %b\n\n" % json.dumps(last).encode() + DONE
        await stream(data)(exchange)

    return answer


@pytest.mark.parametrize("kind", LIES)
async def test_usage_that_contradicts_its_request_is_counted_and_not_learned(
    harness: Harness, model: str, kind: str
) -> None:
    """Prefixes stay at home, and prompts cost what they cost."""
    cold: list[str] = []
    fleet = await harness.fleet(model, 4, bound=BOUND)
    for one in fleet:
        one.usual = counting(LIES[kind], cold)
    order = [f"{number % PREFIXES:08}" for number in range(PREFIXES * EACH)]
    async with harness.expect(model, {"ok": len(order)}, attempts=len(order)):
        for i in range(0, len(order), CLIENTS):
            prompts = [prefix * 500 + f"{i}" for prefix in order[i : i + CLIENTS]]
            await asyncio.gather(
                *(harness.ask(model, prompt, stream=True, max_tokens=100) for prompt in prompts)
            )
    # At random it would be 87. The prefixes themselves, where no time that a busy machine takes moves some.
    assert PREFIXES <= len(cold) <= 2 * PREFIXES
    assert await harness.metric("tidegate_contradicting_answers_total", model=model) == len(order)
    seen = {one["id"]: one for one in (await harness.admin.get("/admin/fleet")).json()["replicas"]}
    for one in fleet:
        assert seen[one.id]["contradicting_answers"] == len(one.log)
    for _, tokens in await harness.samples("tidegate_tokens_total", model=model):
        assert 0 <= tokens < 10**6
