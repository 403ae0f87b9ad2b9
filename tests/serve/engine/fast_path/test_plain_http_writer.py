"""A response writer over plain HTTP."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from serve.engine.fast_path.plain_http_writer import PlainHttpWriter
from serve.engine.frame_server import MAX_KEPT
from serve.engine.interface import Message

HEAD = [(b"content-type", b"text/plain")]


class Client:
    """It reads when ``reads`` is set, and leaves when ``leaves`` is."""

    def __init__(self) -> None:
        self.reads, self.leaves = asyncio.Event(), asyncio.Event()
        self.got: list[Any] = []

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.got.append(message.get("body", message.get("status")))


async def test_what_a_slow_client_has_not_read_leaves_together() -> None:
    client = Client()
    async with PlainHttpWriter(client.receive, client.send) as writer:
        writer.start(200, HEAD)
        writer.write(b"a")
        await asyncio.sleep(0)
        writer.write(b"b")
        writer.write(b"c")
        client.reads.set()
        writer.end(b"d")
    assert client.got == [200, b"a", b"bcd"]


async def test_parts_leave_as_they_come() -> None:
    client = Client()
    client.reads.set()
    async with PlainHttpWriter(client.receive, client.send) as writer:
        writer.start(200, HEAD)
        for part in (b"a", b"b"):
            writer.write(part)
            for _ in range(4):
                await asyncio.sleep(0)
        assert client.got == [200, b"a", b"b"]
        writer.end()
    assert client.got == [200, b"a", b"b", b""]


async def test_a_client_that_leaves_is_reported_once_and_gets_nothing() -> None:
    client, aborted = Client(), []
    client.reads.set()
    async with PlainHttpWriter(client.receive, client.send) as writer:
        writer.on_abort(lambda: aborted.append(1))
        client.leaves.set()
        for _ in range(4):
            await asyncio.sleep(0)
        writer.start(200, HEAD)
        writer.write(b"a")
        writer.on_abort(lambda: aborted.append(2))
    assert aborted == [1, 2]
    assert client.got == []


async def test_a_response_that_nobody_reads_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Its connection ends without a last message, so that nobody takes it for whole."""
    client, aborted, part = Client(), [], bytes(64 * 1024)
    held = sys.getrefcount(part)
    async with PlainHttpWriter(client.receive, client.send) as writer:
        writer.on_abort(lambda: aborted.append(1))
        writer.start(200, HEAD)
        await asyncio.sleep(0)
        for _ in range(MAX_KEPT // len(part)):
            writer.write(part)
        assert not aborted
        for _ in range(3):
            writer.write(b"a")
        assert aborted == [1]
        assert sys.getrefcount(part) == held, "what was not read is dropped"
        writer.end(b"end")
    client.reads.set()
    await asyncio.sleep(0)
    assert client.got == []
    assert caplog.text.count("a response is cut") == 1


async def test_the_bound_is_of_what_is_unread() -> None:
    client, part = Client(), bytes(MAX_KEPT - 1)
    client.reads.set()
    async with PlainHttpWriter(client.receive, client.send) as writer:
        writer.start(200, HEAD)
        for _ in range(3):
            writer.write(part)
            for _ in range(4):
                await asyncio.sleep(0)
        writer.end(b"end")
    assert client.got == [200, part, part, part, b"end"]


async def test_what_a_client_has_not_read_is_dropped_when_it_leaves() -> None:
    client, part = Client(), bytes(64)
    held = sys.getrefcount(part)
    async with PlainHttpWriter(client.receive, client.send) as writer:
        writer.start(200, HEAD)
        writer.write(b"a")
        await asyncio.sleep(0)
        writer.write(part)
        client.leaves.set()
        for _ in range(4):
            await asyncio.sleep(0)
        assert sys.getrefcount(part) == held
        writer.end(part)
        assert sys.getrefcount(part) == held


async def test_a_client_that_leaves_after_the_end_is_no_abort() -> None:
    client, aborted = Client(), []
    async with PlainHttpWriter(client.receive, client.send) as writer:
        writer.on_abort(lambda: aborted.append(1))
        writer.start(200, HEAD)
        writer.end(b"a")
        client.leaves.set()
        await asyncio.sleep(0)
        client.reads.set()
    assert (aborted, client.got) == ([], [200, b"a"])
