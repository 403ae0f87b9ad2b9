"""Backpressure on connections: an exchange may pause its own until its response ends.

What holds of a connection of HTTP holds of a stream of frames.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import cast

import httptools
import pytest
import uvloop
from starlette.types import Message

from gateway.delivery.relay import MAX_CHECKED, MAX_HELD, Relay
from gateway.http.asgi_exchange import SENT
from gateway.http.frame_client import FrameClientConnection, FrameClientStream
from gateway.http.http1_client import (
    TLS_SLICE,
    ConnectionPool,
    Http1ClientConnection,
    UpstreamConnection,
    is_local_fault,
)
from gateway.protocol.json_structure import JsonPieceReader
from gateway.protocol.paths import ROUTES
from gateway.protocol.sse_validator import ChatValidator
from gateway.protocol.usage import TokenUsage
from gateway.request_context import RequestContext
from gateway.telemetry.metrics import WorkerMetrics
from policy.admission.retry_policy import RESULTS, AttemptOutcome
from policy.routing.replica_health import AttemptResult
from policy.wire import frames
from policy.wire.frames import FrameDecoder, FrameEncoder
from tests.frame_pair import Client as FrameClient

BODY = b'{"choices":[]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
# A part of an answer that is too long to be held is sent before the rest has arrived.
LONG = b'{"choices":[' + b" " * MAX_HELD + b"]}"
LONG_HEAD = HEAD.replace(b"14", b"%d" % len(LONG))
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire:
    """A transport that records its calls."""

    def __init__(self, *, tls: bool = False) -> None:
        self.tls = tls
        self.reading = True
        self.closed = False
        self.written = b""

    def get_extra_info(self, name: str) -> object:
        return self if name == "ssl_object" and self.tls else None

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def writelines(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            self.write(part)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.closed = True

    close = abort


class Client:
    """A client that stops reading its answer at a given message."""

    def __init__(self, *, slow_from: int = 99) -> None:
        self.reads: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.got = 0
        self._slow_from = slow_from

    def send(self, message: Message) -> Awaitable[None]:
        self.got += 1
        return SENT if self.got < self._slow_from or self.reads.done() else self.reads

    def read_on(self) -> None:
        """Read everything buffered, and read without delay from now on."""
        self.reads.set_result(None)


class Line:
    """One pooled connection and the relays that use it in turn."""

    wire: Wire

    def __init__(self, pool: ConnectionPool, connection: Http1ClientConnection) -> None:
        self.pool = pool
        self.connection: Http1ClientConnection | FrameClientConnection = connection
        self._meter = WorkerMetrics().model("alpha")

    @property
    def cancelled(self) -> bool:
        """Whether the replica is told that nobody waits for its answer."""
        return self.wire.closed

    def _take(self) -> UpstreamConnection:
        connection = self.pool.take()
        assert connection is self.connection
        return connection

    async def ask(
        self,
        send: Callable[[Message], Awaitable[None]],
        body: Sequence[bytes | memoryview] = (),
        *,
        stream: bool = False,
    ) -> asyncio.Task[AttemptOutcome]:
        """Begin a request on the pooled connection."""
        scope = {"headers": []}
        self.call = RequestContext(ROUTES["/v1/chat/completions"], scope, _no_message, send)
        self.call.streaming = stream
        self.relay = Relay(self.call, self._take(), ChatValidator(1), self._meter)
        asked = asyncio.create_task(self.relay.run(b"head", body))
        await asyncio.sleep(0)
        return asked

    def answer(self, data: bytes = HEAD + BODY) -> None:
        """Bytes of the replica arrive, unless reading is paused."""
        assert self.wire.reading
        self.connection.data_received(data)


class FrameLine(Line):
    """Relays on the streams of one connection. Answers are HTTP's in records, as a replica writes them."""

    def __init__(self) -> None:
        client = FrameClient()
        self.wire = client.wire  # type: ignore[assignment]
        self.connection = client.connection
        self._meter = WorkerMetrics().model("alpha")
        self._encoder, self._decoder = FrameEncoder(), FrameDecoder()
        client.wire.take()
        client.connection.data_received(frames.ACCEPTED)

    @property
    def cancelled(self) -> bool:
        self.connection._flush()  # type: ignore[union-attr] # as at the end of the turn
        sent = self._decoder.feed(self.wire.take())  # type: ignore[attr-defined]
        return (frames.CANCEL, self._stream.number) in [record[:2] for record in sent]

    def _take(self) -> UpstreamConnection:
        assert isinstance(self.connection, FrameClientConnection)
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._stream = FrameClientStream(self.connection)
        return self._stream

    def answer(self, data: bytes = HEAD + BODY) -> None:
        self._parser.feed_data(data)
        self.connection.data_received(self._encoder.take())

    def reset(self) -> None:
        """The replica cuts the stream."""
        self._encoder.add(frames.RESET, self._stream.number, b"")
        self.connection.data_received(self._encoder.take())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        head = frames.head(self._parser.get_status_code(), self._headers)
        self._encoder.add(frames.HEAD, self._stream.number, head)

    def on_body(self, body: bytes) -> None:
        for at in range(0, len(body), frames.MAX_PAYLOAD):
            self._encoder.add(frames.DATA, self._stream.number, body[at : at + frames.MAX_PAYLOAD])

    def on_message_complete(self) -> None:
        self._encoder.add(frames.END, self._stream.number, b"")


async def _no_message() -> Message:
    raise AssertionError("a relay does not read from the client")


@pytest.fixture
def line(request: pytest.FixtureRequest) -> Line:
    return idle_line(tls=getattr(request, "param", False))


@pytest.fixture(params=["HTTP", "frames"])
async def either(request: pytest.FixtureRequest) -> Line:
    """A line of each way."""
    return idle_line() if request.param == "HTTP" else FrameLine()


def idle_line(*, tls: bool = False) -> Line:
    pool = ConnectionPool("http://replica:1", 1.0)
    line = Line(pool, Http1ClientConnection(pool))
    line.wire = Wire(tls=tls)
    line.connection.connection_made(cast("asyncio.Transport", line.wire))
    pool.give(line.connection)
    return line


@pytest.mark.parametrize("line", [True], indirect=True)
@pytest.mark.parametrize("whole", [True, False])
async def test_a_large_request_over_tls_is_written_in_slices(line: Line, *, whole: bool) -> None:
    """A connection of which the server has not read the whole request serves no other one."""
    body = bytes(range(256)) * (2 * TLS_SLICE // 256) + b"end"
    asked = await line.ask(Client().send, [memoryview(body)[:9], memoryview(body)[9:]])
    line.connection.pause_writing()
    await asyncio.sleep(0)
    assert len(line.wire.written) <= TLS_SLICE + 9
    if whole:
        line.connection.resume_writing()
        for _ in range(9):
            await asyncio.sleep(0)
        assert line.wire.written == b"head" + body
    line.answer()
    assert await asked is AttemptOutcome.SERVED
    assert line.wire.closed is not whole


async def test_a_client_slow_at_the_last_byte_does_not_block_the_next_request(either: Line) -> None:
    slow, quick = Client(slow_from=2), Client()
    first = await either.ask(slow.send)
    either.answer()
    second = await either.ask(quick.send)
    either.answer()
    assert await second is AttemptOutcome.SERVED
    assert await first is AttemptOutcome.SERVED
    slow.read_on()


@pytest.mark.parametrize(("slow_from", "outcome"), [(2, AttemptOutcome.LEFT), (99, AttemptOutcome.BROKEN)])
async def test_a_stream_that_is_cut_while_its_client_does_not_read_is_not_the_replicas_fault(
    slow_from: int, outcome: AttemptOutcome
) -> None:
    """A replica cuts the stream of a client that leaves megabytes unread."""
    line, client = FrameLine(), Client(slow_from=slow_from)
    asked = await line.ask(client.send, stream=True)
    line.answer(STREAM_HEAD + b"9\r\ndata: 1\n\n\r\n")
    line.reset()
    assert await asked is outcome
    assert RESULTS.get(outcome) is (AttemptResult.BAD if slow_from == 99 else None)
    assert line.relay.lost is (slow_from == 99)


async def test_a_client_that_catches_up_does_not_resume_the_next_requests_connection(line: Line) -> None:
    first_client, second_client = Client(slow_from=2), Client(slow_from=2)
    first = await line.ask(first_client.send)
    line.answer()
    second = await line.ask(second_client.send)
    line.answer(LONG_HEAD + LONG[:-2])
    assert not line.wire.reading
    first_client.read_on()
    await first
    assert not line.wire.reading
    second_client.read_on()
    await asyncio.sleep(0.01)
    line.answer(LONG[-2:])
    assert await second is AttemptOutcome.SERVED


@pytest.mark.parametrize("ends", ["as JSON", "as none", "when its client left"])
async def test_large_answers_are_checked_in_turns_of_their_own(ends: str) -> None:
    pieces, checked, clients = JsonPieceReader(), list[int](), [Client() for _ in range(6)]
    asked, lines = [], []
    for client in clients:
        line = idle_line()
        asked.append(await line.ask(client.send))
        line.call.pieces = pieces
        lines.append(line)
    body = b'{"choices":[' + b" " * MAX_CHECKED + (b"]}" if ends != "as none" else b"]")
    for line in lines:
        line.answer(HEAD.replace(b"14", b"%d" % len(body)) + body)
    if ends == "when its client left":
        asked[0].cancel()
    for _ in range(40):
        before = sum(not line.relay._unchecked for line in lines)
        await asyncio.sleep(0)
        checked.append(sum(not line.relay._unchecked for line in lines) - before)
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    if ends == "when its client left":
        assert isinstance(outcomes.pop(0), asyncio.CancelledError)
        assert clients.pop(0).got == 0
    assert sum(checked) == len(clients) and max(checked) == 1
    assert all(one == 0 or other == 0 for one, other in pairwise(checked))
    served = ends != "as none"
    assert set(outcomes) == {AttemptOutcome.SERVED if served else AttemptOutcome.FAILED}
    assert {client.got for client in clients} == {2 if served else 0}


async def test_a_disconnect_after_the_answer_keeps_the_connection(either: Line) -> None:
    first = await either.ask(Client(slow_from=2).send)
    either.answer()
    second = await either.ask(Client().send)
    first.cancel()
    await asyncio.wait([first])
    assert not (either.cancelled or either.wire.closed)
    either.answer()
    assert await second is AttemptOutcome.SERVED


async def test_a_disconnect_before_the_answer_is_told_to_the_replica(either: Line) -> None:
    asked = await either.ask(Client().send)
    either.answer(HEAD + BODY[:4])
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert either.cancelled


@pytest.mark.parametrize("lost", [False, True])
async def test_a_failing_send_to_the_client_ends_the_call(either: Line, lost: bool) -> None:
    def broken(message: Message) -> Awaitable[None]:
        if not message.get("more_body", True):
            raise LookupError
        return SENT

    asked = await either.ask(broken, stream=True)
    either.answer(STREAM_HEAD + b"9\r\ndata: 1\n\n\r\n")
    if lost:
        either.connection.connection_lost(None)
    else:
        either.answer(b"0\r\n\r\n")
    with pytest.raises(LookupError):
        await asked


async def test_a_finished_call_leaves_no_reference_cycle(either: Line) -> None:
    client = Client()
    held = weakref.ref(client)
    gc.disable()
    try:
        asked = await either.ask(client.send)
        either.answer()
        assert await asked is AttemptOutcome.SERVED
        del client, asked, either.call, either.relay
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("sent", [b"", HEAD + BODY[:4], HEAD + BODY], ids=["nothing", "half", "all"])
async def test_a_lost_connection_is_freed_without_a_collection(either: Line, sent: bytes) -> None:
    held = weakref.ref(either.connection)
    gc.disable()
    try:
        asked = await either.ask(Client().send)
        either.answer(sent)
        either.connection.connection_lost(None)
        await asyncio.wait([asked])
        if isinstance(either, FrameLine):
            del either._stream, either.wire.protocol  # type: ignore[attr-defined]
        del asked, either.connection, either.call, either.relay
        assert held() is None
    finally:
        gc.enable()


async def test_a_connection_that_was_refused_is_freed_without_a_collection() -> None:
    held = weakref.ref(Http1ClientConnection(ConnectionPool("http://replica:1", 1.0)))
    assert held() is None


async def test_a_pooled_connection_resumes_reading(line: Line) -> None:
    asked = await line.ask(Client(slow_from=2).send)
    line.answer(LONG_HEAD + LONG[:-2])
    assert not line.wire.reading
    line.connection.data_received(LONG[-2:])  # read by the transport before the pause
    await asyncio.sleep(0)  # a long read is the last of its turn
    assert line.wire.reading
    assert line.pool.take() is line.connection
    assert await asked is AttemptOutcome.SERVED


async def test_backpressure_of_a_slow_client_is_not_a_silent_replica(either: Line) -> None:
    client = Client(slow_from=2)
    asked = await either.ask(client.send)
    either.answer(LONG_HEAD + LONG[:-2])
    assert either.relay.has_progressed()
    assert either.relay.has_progressed()
    client.read_on()
    await asyncio.sleep(0)
    assert not either.relay.has_progressed()
    either.answer(LONG[-2:])
    assert await asked is AttemptOutcome.SERVED
    assert either.relay.has_progressed()


async def test_events_of_an_abandoned_stream_are_counted(either: Line) -> None:
    asked = await either.ask(Client().send, stream=True)
    either.answer(STREAM_HEAD + b"1e\r\n" + b'data: {"x":1}\n\n' * 2 + b"\r\n")
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert either.call.usage == TokenUsage(0, 0, 2, exact=False)


@pytest.mark.parametrize("large", [False, True])
async def test_a_body_in_parts_is_sent_in_order(line: Line, large: bool) -> None:
    parts = [b'{"a":1', memoryview(b"," + b" " * (100_000 if large else 1)), b"}"]
    asked = await line.ask(Client().send, parts)
    assert line.wire.written == b"head" + b"".join(parts)
    line.answer()
    assert await asked is AttemptOutcome.SERVED


@pytest.mark.parametrize(
    ("ends", "stale"), [("closed before", True), ("closed after", False), ("reset after", False)]
)
@pytest.mark.parametrize("kept", [True, False])
async def test_a_connection_is_stale_if_it_was_closed_before_the_request_arrived(
    ends: str, stale: bool, kept: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pool = ConnectionPool(f"http://127.0.0.1:{server.getsockname()[1]}", 1.0)
        line = Line(pool, await pool.connect())
        peer, _ = server.accept()
        with peer:
            pool.give(line.connection)
            if kept:
                asked = await line.ask(Client().send)
                peer.recv(9)
                peer.sendall(HEAD + BODY)
                assert await asked is AttemptOutcome.SERVED
            if ends == "closed before":
                peer.close()
            asked = await line.ask(Client().send)
            if ends == "closed after":
                peer.recv(9)
            elif ends == "reset after":
                peer.recv(9)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        assert await asked is (AttemptOutcome.STALE if stale and kept else AttemptOutcome.LOST)


def test_a_connection_that_is_given_up_while_it_opens_is_freed_without_a_collection() -> None:
    """Also between the moment in which it is open and that in which its opener goes on."""

    async def give_up(port: int, turns: int) -> weakref.ref[object]:
        pool = ConnectionPool(f"http://127.0.0.1:{port}", 1.0)
        opening = asyncio.create_task(pool.connect())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():
            opening.result().kill()
        return weakref.ref(pool)

    async def give_up_at_any_time(port: int) -> list[object]:
        held = [await give_up(port, turns) for turns in range(12)]
        await asyncio.sleep(0.05)
        return [pool() for pool in held]

    gc.disable()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert uvloop.run(give_up_at_any_time(server.getsockname()[1])) == [None] * 12
    finally:
        gc.enable()


def test_a_lack_of_descriptors_for_one_of_two_addresses_is_no_fault_of_the_server() -> None:
    refused, lacking = ConnectionRefusedError(errno.ECONNREFUSED, ""), OSError(errno.EMFILE, "")
    for errors, local in (([refused, lacking], True), ([refused, refused], False)):
        failed = OSError("All connection attempts failed")
        failed.__cause__ = ExceptionGroup("", errors)
        assert is_local_fault(failed) is local
