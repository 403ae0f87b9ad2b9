"""Faults of upstreams, as answers to one request."""

from __future__ import annotations

import asyncio
import json
import time

from tests.gateway.fake_replica import ANSWER, DONE, Answer, Exchange, event

EVENTS = "text/event-stream; charset=utf-8"


def tokens(count: int) -> bytes:
    return b"".join(event(f"t{i} ") for i in range(count))


def status(code: int, message: str = "boom", **headers: str) -> Answer:
    body = json.dumps({"error": {"message": message, "type": "SomeError", "param": None, "code": code}})

    async def answer(exchange: Exchange) -> None:
        await exchange.reply(body.encode(), status=code, **headers)

    return answer


def reply(
    body: bytes = ANSWER, *, code: int = 200, content_type: str = "application/json", **headers: str
) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.reply(body, status=code, content_type=content_type, **headers)

    return answer


def stalling(after: bytes = b"") -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.head(EVENTS)
        if after:
            await exchange.chunk(after)
        await exchange.gone.wait()

    return answer


async def silent(exchange: Exchange) -> None:
    await exchange.gone.wait()


def breaking(after: bytes, *, reset: bool) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.head(EVENTS)
        await exchange.chunk(after)
        await asyncio.sleep(0.05)  # a reset discards what the other side has not read yet
        (exchange.reset if reset else exchange.close)()

    return answer


def paced(count: int, gap_s: float, *, first_s: float = 0.0) -> Answer:
    """A healthy answer of ``count`` tokens, ``gap_s`` apart, the first after ``first_s``."""

    async def answer(exchange: Exchange) -> None:
        if not exchange.json.get("stream"):
            await asyncio.sleep(first_s + count * gap_s)
            await exchange.reply(ANSWER)
            return
        await exchange.head(EVENTS)
        began = time.monotonic() + first_s
        for i in range(count):
            await asyncio.sleep(max(0.0, began + i * gap_s - time.monotonic()))
            if exchange.gone.is_set():
                return
            await exchange.chunk(event(f"t{i} "))
        await exchange.chunk(event(finish="stop") + DONE)
        await exchange.end()

    return answer


def held(until: asyncio.Event, before: int = 3) -> Answer:
    """A healthy answer: ``before`` tokens, and the rest once ``until`` is set; a whole one at once."""

    async def answer(exchange: Exchange) -> None:
        if not exchange.json.get("stream"):
            await exchange.reply(ANSWER)
            return
        await exchange.head(EVENTS)
        for i in range(before):
            await exchange.chunk(event(f"t{i} "))
        either = [asyncio.create_task(one.wait()) for one in (until, exchange.gone)]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for one in either:
            one.cancel()
        if exchange.gone.is_set():
            return
        await exchange.chunk(tokens(2) + event(finish="stop") + DONE)
        await exchange.end()

    return answer


def kept_alive(comments: int, gap_s: float) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.head(EVENTS)
        for _ in range(comments):
            await exchange.chunk(b": keep-alive\n\n")
            await asyncio.sleep(gap_s)
        await exchange.chunk(tokens(2) + event(finish="stop") + DONE)
        await exchange.end()

    return answer


def flooding(block: bytes, total: int, *, end: bytes = b"") -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.head(EVENTS)
        for _ in range(total // len(block)):
            await exchange.chunk(block)
            while exchange.unsent > 2 * len(block) and not exchange.gone.is_set():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
            if exchange.gone.is_set():
                return
        if end:
            await exchange.chunk(end)
        await exchange.end()

    return answer
