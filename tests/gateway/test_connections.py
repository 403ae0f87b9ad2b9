"""Who may hold a kept connection back, and when: an exchange's rights end with its response."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from starlette.types import Message

from gateway.call import Call
from gateway.metrics import Metrics
from gateway.relay import Relay, Verdict
from gateway.sse import ChatTail
from gateway.surface import ROUTES
from gateway.upstream import Connection, Pool

BODY = b'{"choices":[]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)


class Wire:
    """A transport that notes what becomes of it."""

    def __init__(self) -> None:
        self.reading = True
        self.closed = False

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        assert not self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.closed = True

    close = abort


class Client:
    """A client that takes its answer up to a message that it makes wait."""

    def __init__(self, *, slow_from: int = 99) -> None:
        self.reads = asyncio.Event()
        self.got = 0
        self._slow_from = slow_from

    async def send(self, message: Message) -> None:
        self.got += 1
        if self.got >= self._slow_from:
            await self.reads.wait()


class Line:
    """One pooled connection and the relays that use it in turn."""

    def __init__(self) -> None:
        self.pool = Pool("http://replica:1", 1.0)
        self.wire = Wire()
        self.connection = Connection(self.pool)
        self.connection.connection_made(cast("asyncio.Transport", self.wire))
        self.pool.give(self.connection)
        self._meter = Metrics().model("alpha")

    async def ask(self, send: Callable[[Message], Awaitable[None]]) -> asyncio.Task[Verdict]:
        """Begin a request on the pooled connection."""
        connection = self.pool.take()
        assert connection is self.connection
        scope = {"headers": []}
        call = Call(ROUTES["/v1/chat/completions"], scope, _no_message, send)
        asked = asyncio.create_task(Relay(call, connection, ChatTail(1), self._meter).run(b"", b""))
        await asyncio.sleep(0)
        return asked

    def answer(self, data: bytes = HEAD + BODY) -> None:
        """The replica's bytes arrive, which a transport that is held back does not let happen."""
        assert self.wire.reading
        self.connection.data_received(data)


async def _no_message() -> Message:
    raise AssertionError("a relay does not read from the client")


@pytest.fixture
def line() -> Line:
    return Line()


async def test_a_client_slow_to_take_the_last_byte_holds_up_nobody_else(line: Line) -> None:
    slow, quick = Client(slow_from=2), Client()
    first = await line.ask(slow.send)
    line.answer()
    second = await line.ask(quick.send)
    line.answer()
    assert await second is Verdict.SERVED
    assert not first.done()
    slow.reads.set()
    assert await first is Verdict.SERVED


async def test_a_client_that_catches_up_does_not_let_go_what_another_holds(line: Line) -> None:
    first_client, second_client = Client(slow_from=2), Client(slow_from=2)
    first = await line.ask(first_client.send)
    line.answer()
    second = await line.ask(second_client.send)
    line.answer(HEAD + BODY[:4])
    assert not line.wire.reading
    first_client.reads.set()
    await first
    assert not line.wire.reading
    second_client.reads.set()
    await asyncio.sleep(0.01)
    line.answer(BODY[4:])
    assert await second is Verdict.SERVED


async def test_leaving_after_the_whole_answer_came_cuts_nobody_else(line: Line) -> None:
    first = await line.ask(Client(slow_from=2).send)
    line.answer()
    second = await line.ask(Client().send)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not line.wire.closed
    line.answer()
    assert await second is Verdict.SERVED


async def test_leaving_before_the_whole_answer_came_closes_the_connection(line: Line) -> None:
    asked = await line.ask(Client().send)
    line.answer(HEAD + BODY[:4])
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert line.wire.closed


@pytest.mark.parametrize("lost", [False, True])
async def test_an_answer_that_cannot_be_handed_over_ends_its_call(line: Line, lost: bool) -> None:
    async def broken(message: Message) -> None:
        if not message.get("more_body", True):
            raise LookupError

    asked = await line.ask(broken)
    stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    line.answer(stream + b"9\r\ndata: 1\n\n\r\n")
    if lost:
        line.connection.connection_lost(None)
    else:
        line.answer(b"0\r\n\r\n")
    with pytest.raises(LookupError):
        await asked


async def test_what_a_call_held_is_freed_with_it(line: Line) -> None:
    client = Client()
    held = weakref.ref(client)
    gc.disable()
    try:
        asked = await line.ask(client.send)
        line.answer()
        assert await asked is Verdict.SERVED
        del client, asked
        assert held() is None
    finally:
        gc.enable()


async def test_a_kept_connection_is_read(line: Line) -> None:
    asked = await line.ask(Client(slow_from=2).send)
    line.answer(HEAD + BODY[:4])
    assert not line.wire.reading
    line.connection.data_received(BODY[4:])  # what a transport had read before it was held back
    assert line.wire.reading
    assert line.pool.take() is line.connection
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
