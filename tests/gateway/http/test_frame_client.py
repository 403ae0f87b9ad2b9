"""Streams of one connection: each is as a connection of its own, and all end with the connection."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.frame_client import (
    MOST_LOST,
    MOST_RECORDS,
    TIMED_BYTES,
    UPLOAD_BYTES,
    FrameChannel,
    FrameClientConnection,
)
from gateway.http.http1_client import ConnectionPool, Http1ClientConnection
from gateway.http.read_turns import TURN_S
from policy.wire import frames
from policy.wire.frames import MAX_PAYLOAD, WINDOW_BYTES, FrameDecoder, FrameEncoder, Record
from serve.engine.interface import ResponseWriter
from tests.frame_pair import EVENTS, SECRET, Client, Got, Pair, written
from tests.gateway.worker import until

HEAD = frames.head(200, EVENTS)


# Requests: the size of each, and of the response the size of a part, and whether the last part has data.
REQUESTS = st.lists(
    st.tuples(st.integers(0, 150_000), st.integers(1, 100_000), st.booleans()), min_size=1, max_size=5
)
# What the network carries in a turn, and when the transports are full.
CARRIED = st.integers(2_000, 200_000)
LIMITS = st.tuples(st.sampled_from([1, 65_536, 1 << 30]), st.sampled_from([1, 65_536, 1 << 30]))
Requests = list[tuple[int, int, bool]]


def echoing(requests: Requests, limits: tuple[int, int]) -> tuple[Pair, list[bytes]]:
    """Both ends, of which one sends each body back in its parts; and the bodies."""

    def serve(writer: ResponseWriter, body: bytes) -> None:
        _, part, ends_with_data = requests[body[0]]
        writer.start(200, EVENTS)
        parts = [body[at : at + part] for at in range(0, len(body), part)]
        last = parts.pop() if ends_with_data else b""
        for each in parts:
            writer.write(each)
        writer.end(last)

    bodies = [
        bytes([number]) + bytes(range(256)) * (size // 256) for number, (size, _, _) in enumerate(requests)
    ]
    return Pair(written(serve), *limits), bodies


@pytest.mark.slow
@given(requests=REQUESTS, carried=CARRIED, limits=LIMITS, held=st.sets(st.integers(0, 4)))
@settings(max_examples=40)
def test_each_stream_gets_its_own_bytes_in_order(
    requests: Requests, carried: int, limits: tuple[int, int], held: set[int]
) -> None:
    """However much the network carries at a time, who is full, and which clients do not read for a while."""

    async def play() -> None:
        pair, sent = echoing(requests, limits)
        asked = [pair.ask(body) for body in sent]
        for number in held & set(range(len(asked))):
            asked[number][0].pause(asked[number][1])
        await pair.settle(carried)
        for number, (stream, got) in enumerate(asked):
            assert got.complete or number in held
            assert len(got.body) <= WINDOW_BYTES or number not in held
            stream.resume(got)
        await pair.settle(carried)
        assert [got.body for _, got in asked] == sent
        assert all(got.complete for _, got in asked)
        await asyncio.sleep(0)
        assert not pair.state.tasks
        # Each end closes at once only if it has no streams.
        pair.server.shutdown()
        pair.connection.leave()
        assert pair.back.closed and pair.wire.closed
        await asyncio.sleep(0)

    asyncio.run(play())


class Played(Client):
    """A client whose replica the test plays."""

    def __init__(self, limit: int = 1 << 30, acked: int | None = None) -> None:
        super().__init__(limit, acked)
        self.encoder, self._decoder = FrameEncoder(), FrameDecoder()
        assert self.wire.take() == frames.preface(SECRET)
        self.connection.data_received(frames.ACCEPTED)
        assert self.connection.alive

    async def sent(self) -> list[Record]:
        """What the client has sent since the last call, as far as its transport took it."""
        await asyncio.sleep(0)
        records = self._decoder.feed(self.wire.take())
        self._decoder.check()
        return records

    def play(self, *records: Record) -> None:
        for record in records:
            self.encoder.add(*record)
        self.receive(self.encoder.take())

    def answer(self, number: int, body: bytes = b"") -> None:
        self.play((frames.HEAD, number, HEAD), (frames.END, number, body))


@contextmanager
def reported(*kinds: type[Exception]) -> Iterator[None]:
    """The event loop is told of exactly these failures."""
    found: list[type] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: found.append(type(context["exception"])))
    yield
    assert found == list(kinds)


@pytest.mark.slow
@given(requests=REQUESTS, carried=st.integers(1, 200_000), limits=LIMITS, turns=st.integers(0, 20))
@settings(max_examples=40)
def test_a_cut_at_any_byte_ends_each_stream_once(
    requests: Requests, carried: int, limits: tuple[int, int], turns: int
) -> None:
    async def play() -> None:
        pair, sent = echoing(requests, limits)
        sinks = [pair.ask(body)[1] for body in sent]
        await pair.turn(turns, carried)
        pair.wire.close()
        await pair.turn()
        for body, got in zip(sent, sinks, strict=True):
            assert got.complete is (got.body == body and not got.lost)
            assert got.lost is not got.complete
            assert body.startswith(got.body)
        await pair.turn()
        assert not (pair.state.tasks or pair.state.connections)

    asyncio.run(play())


async def test_small_requests_of_a_turn_leave_in_one_frame() -> None:
    client = Played()
    for _ in range(3):
        client.ask(b"body")
    await asyncio.sleep(0)
    assert int.from_bytes(client.wire.written[:4]) == len(client.wire.written) - 4
    assert [(kind, number) for kind, number, _ in await client.sent()] == [
        (kind, number) for number in (1, 2, 3) for kind in (frames.REQUEST, frames.BODY)
    ]


async def test_uploads_take_turns_and_what_is_over_is_dropped() -> None:
    client = Played(limit=UPLOAD_BYTES // 2)
    body = b"x" * (10 * MAX_PAYLOAD)
    first, got = client.ask([body[:100], body])
    _, other = client.ask(body)
    sent = await client.sent()
    assert [number for kind, number, _ in sent if kind == frames.BODY] == [1, 2, 1, 2, 1]
    await asyncio.sleep(0)  # the transport is full again, and nobody reads
    first.abort(got)

    async def rest() -> list[Record]:
        return [record for _ in range(20) for record in await client.sent()]

    after = await rest()
    assert after.count((frames.CANCEL, 1, b"")) == 1
    cancelled = after.index((frames.CANCEL, 1, b""))
    assert {number for kind, number, _ in after[cancelled:] if kind == frames.BODY} == {2}
    assert sum(len(data) for kind, number, data in sent + after if (kind, number) == (frames.BODY, 2)) == len(
        body
    )
    client.ask(body)
    await asyncio.sleep(0)
    client.answer(3, b"too large")  # before the body was sent
    assert sum(len(data) for kind, _, data in await rest() if kind == frames.BODY) < len(body)
    assert not other.lost


@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=5))
def test_uploads_take_turns_as_in_a_plain_queue(pieces: list[int], ends: list[int]) -> None:
    """``pieces`` are those of each body; one of ``ends`` is given up after each turn of the event loop."""

    async def play() -> None:
        client = Played()
        asked = [client.ask(b"x" * (count * MAX_PAYLOAD)) for count in pieces]
        plain = deque((stream.number, count) for (stream, _), count in zip(asked, pieces, strict=True))
        for end in [*ends, *[None] * sum(pieces)]:
            expected = []
            while plain and len(expected) * MAX_PAYLOAD < UPLOAD_BYTES:
                number, left = plain.popleft()
                expected.append(number)
                if left > 1:
                    plain.append((number, left - 1))
            assert [number for kind, number, _ in await client.sent() if kind == frames.BODY] == expected
            if end is not None and end < len(asked):
                stream, got = asked[end]
                stream.abort(got)
                plain = deque(each for each in plain if each[0] != stream.number)
        assert await client.sent() == []

    asyncio.run(play())


async def test_a_client_that_does_not_read_stops_its_own_stream() -> None:
    text = bytes(range(256)) * 1200

    def serve(writer: ResponseWriter, body: bytes) -> None:
        writer.start(200, EVENTS)
        writer.end(text)

    pair = Pair(written(serve))
    slow, held = pair.ask()
    slow.pause(held)
    _, quick = pair.ask()
    await pair.settle()
    assert quick.complete and quick.body == text
    assert held.body == text[:WINDOW_BYTES]
    slow.resume(held)
    await pair.settle()
    assert held.complete and held.body == text


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([(frames.DATA, 9, b"x")], id="a stream that was never opened"),
        pytest.param([(frames.DATA, 0, b"x")], id="stream 0"),
        pytest.param([(frames.DATA, 2, b"x")], id="a body without a head"),
        pytest.param([(frames.END, 2, b"x")], id="an end without a head"),
        pytest.param([(frames.HEAD, 1, HEAD)], id="a second head"),
        pytest.param([(frames.HEAD, 2, b"?")], id="half a head"),
        pytest.param([(frames.WINDOW, 1, b"")], id="a kind that only gateways send"),
        pytest.param([(99, 1, b"")], id="an unknown kind"),
        pytest.param([], id="no frame"),
        pytest.param([(frames.DATA, 1, bytes(WINDOW_BYTES))], id="more than a window"),
    ],
)
async def test_a_replica_that_breaks_the_format_ends_all_its_streams_once(
    records: Sequence[Record],
) -> None:
    """None of them is stale: what is on its way when the gateway closes may still arrive."""
    client = Played(acked=0)
    sinks = [client.ask()[1] for _ in range(3)]
    await client.sent()
    client.play((frames.HEAD, 1, HEAD), (frames.DATA, 1, b"well"))
    with reported(frames.BrokenFrames):
        if records:
            client.play(*records)
        else:
            client.connection.data_received(b"HTTP/1.1 400 Bad Request\r\n")
        assert client.wire.closed and not client.connection.alive
        client.play((frames.END, 1, b"after it"))
        await asyncio.sleep(0)
    assert [sink.stale for sink in sinks] == [False] * 3
    assert sinks[0].body.rstrip(b"\0") == b"well"


class Slow(Got):
    """A sink that spends the time of a turn with each part."""

    def on_data(self, data: bytes, *, complete: bool) -> None:
        until_s = monotonic() + TURN_S
        while monotonic() < until_s:
            pass
        super().on_data(data, complete=complete)


def read(connection: FrameClientConnection, data: bytes) -> bytes:
    """Have a connection read from its socket; returns what is left."""
    view = connection.get_buffer(0)
    part = data[: len(view)]
    view[: len(part)] = part
    connection.buffer_updated(len(part))
    return data[len(part) :]


@pytest.mark.parametrize("late", [False, True])
async def test_an_answer_that_is_whole_before_the_format_breaks_is_delivered(late: bool) -> None:
    """However the network cuts the bytes, and where the time of a turn was spent between them."""
    client = Played()
    sinks = [client.ask(sink=Slow() if late else Got())[1] for _ in range(3)]
    for number in (1, 2):
        client.encoder.add(frames.HEAD, number, HEAD)
        client.encoder.add(frames.END, number, b"whole")
    with reported(frames.BrokenFrames):
        assert not read(client.connection, client.encoder.take() + b"\0\0\0\3\0\0\0\1")
        for _ in range(5):
            await asyncio.sleep(0)
    assert client.wire.closed
    assert [(got.body, got.complete, got.lost) for got in sinks] == [
        (b"whole", True, False), (b"whole", True, False), (b"", False, True)
    ]  # fmt: skip


async def test_an_unknown_kind_breaks_also_a_stream_that_is_over() -> None:
    client = Played()
    client.ask()
    client.answer(1)
    with reported(frames.BrokenFrames):
        client.play((99, 1, b""))
    assert client.wire.closed


async def test_a_sink_that_fails_ends_its_own_stream() -> None:
    client = Played()
    _, bad = client.ask(sink=Got(LookupError()))
    _, good = client.ask()
    with reported(LookupError):
        client.play((frames.HEAD, 1, HEAD), (frames.HEAD, 2, HEAD), (frames.DATA, 1, b"a"))
        client.play((frames.DATA, 1, b"ignored"), (frames.END, 1, b""), (frames.END, 2, b"b"))
    assert (bad.body, bad.stale, good.body, good.complete) == (b"a", False, b"b", True)
    assert (frames.CANCEL, 1, b"") in await client.sent()
    assert client.connection.alive


async def test_what_comes_after_a_cancellation_is_ignored() -> None:
    client = Played()
    stream, got = client.ask()
    client.play((frames.HEAD, 1, HEAD), (frames.DATA, 1, b"a"))
    stream.abort(got)
    stream.abort(got)
    client.play((frames.DATA, 1, b"b"), (frames.RESET, 1, b""))
    assert (got.body, got.complete, got.lost) == (b"a", False, False)
    assert [kind for kind, _, _ in await client.sent()].count(frames.CANCEL) == 1


async def test_a_response_that_broke_is_lost_alone() -> None:
    client = Played()
    sinks = [client.ask()[1] for _ in range(2)]
    client.play((frames.RESET, 1, b""))
    client.answer(2)
    assert (sinks[0].stale, sinks[1].complete) == (False, True)


@pytest.mark.parametrize("ends", ["first", "cancelled", "answered", "closed"])
async def test_a_connection_that_is_left_closes_with_its_last_stream(ends: str) -> None:
    client = Played(limit=0)  # its replica reads no more
    stream, got = client.ask()
    if ends == "first":
        client.answer(1)
    client.connection.leave()
    assert not client.connection.alive
    assert client.wire.closed is (ends == "first")
    if ends == "cancelled":
        stream.abort(got)
    elif ends == "answered":
        client.answer(1, b"whole")
        assert got.body == b"whole"
    elif ends == "closed":
        client.connection.close()
    assert client.wire.closed
    client.connection.close()
    await asyncio.sleep(0)
    assert client.connection.round_trip_s() == 0.0
    client.connection.leave()
    assert got.lost is (ends == "closed")


@pytest.mark.parametrize(
    ("acked", "error", "stale"),
    [
        pytest.param(None, None, [False, True], id="unknown"),
        pytest.param(0, None, [True, True], id="nothing"),
        pytest.param(1 << 20, None, [False, True], id="what was written"),
        pytest.param(0, BrokenPipeError(), [True, True], id="closed before the write"),
        pytest.param(0, ConnectionResetError(), [False, False], id="reset"),
    ],
)
async def test_requests_that_never_arrived_are_stale(
    acked: int | None, error: Exception | None, stale: list[bool]
) -> None:
    """The first one was written, the second was not."""
    client = Played(acked=acked)
    _, first = client.ask()
    await asyncio.sleep(0)
    _, second = client.ask()
    client.connection.connection_lost(error)
    assert [first.stale, second.stale] == stale
    _, late = client.ask()
    await asyncio.sleep(0)
    assert late.stale


async def test_a_stream_that_has_begun_is_never_stale() -> None:
    client = Played(acked=0)
    _, got = client.ask()
    client.play((frames.HEAD, 1, HEAD))
    client.connection.connection_lost(None)
    assert got.stale is False


async def test_what_comes_for_requests_is_progress_also_after_the_connection_was_left() -> None:
    client = Played()
    load, _ = client.ask()
    load.counts = False
    client.ask()
    client.play((frames.HEAD, 1, HEAD), (frames.DATA, 1, b"line"))
    assert (client.channel.progress, load.received) == (0, True)
    client.connection.leave()
    client.answer(2)
    assert client.channel.progress == 2


async def test_streams_that_end_together_do_so_over_several_turns() -> None:
    """A hundred ends are a kilobyte: of a read, some are taken in each turn; and of a lost connection."""
    client, count = Played(), 3 * MOST_RECORDS
    asked = [client.ask()[1] for _ in range(2 * count)]
    for number in range(1, 2 * count + 1):
        client.play((frames.HEAD, number, HEAD))
    encoder = client.encoder
    for number in range(1, count + 1):
        encoder.add(frames.END, number, b"")
    assert not read(client.connection, encoder.take())
    ended = [sum(got.complete for got in asked)]
    while ended[-1] < count:
        await asyncio.sleep(0)
        ended.append(sum(got.complete for got in asked))
    assert max(after - before for before, after in itertools.pairwise([0, *ended])) == MOST_RECORDS
    client.connection.connection_lost(None)
    lost = [0]
    while lost[-1] < count:
        lost.append(sum(got.lost for got in asked))
        await asyncio.sleep(0)
    assert max(after - before for before, after in itertools.pairwise(lost)) == MOST_LOST


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("kind", [frames.END, frames.DATA])
async def test_answers_that_take_long_are_taken_over_several_turns(kind: int, is_lost: bool) -> None:
    """Those that came before the connection was lost, too; what did not come is lost after them."""
    client, count, size = Played(), 9, TIMED_BYTES if kind == frames.DATA else 0
    asked = [client.ask(sink=Slow())[1] for _ in range(count + 1)]
    for number in range(1, count + 2):
        client.play((frames.HEAD, number, HEAD))
    for number in range(1, count + 1):
        client.encoder.add(kind, number, bytes(size))
    data, loses = client.encoder.take(), is_lost
    steps = [0]

    def taken() -> int:
        return sum(map(len, (got.parts for got in asked)))

    while taken() < count:
        if data:
            data = read(client.connection, data)
        elif loses:
            loses = False
            client.connection.connection_lost(ConnectionResetError())
        steps.append(taken())
        await asyncio.sleep(0)
        steps.append(taken())
        assert [len(got.parts) for got in asked] == [1] * taken() + [0] * (count + 1 - taken())
    assert max(after - before for before, after in itertools.pairwise(steps)) == 1
    await asyncio.sleep(0)
    assert (asked[-1].lost, [got.complete for got in asked[:count]]) == (
        is_lost and not loses, [kind == frames.END] * count
    )  # fmt: skip


async def test_a_lost_connection_is_freed_without_a_collection() -> None:
    client = Played()
    _, got = client.ask([b"x" * 400_000])
    client.play((frames.HEAD, 1, HEAD))
    held = weakref.ref(client.connection), weakref.ref(got)
    gc.disable()
    try:
        client.connection.connection_lost(None)
        client.wire.protocol = None
        del client, got
        for _ in range(2):
            await asyncio.sleep(0)
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"TIDEGATE-FRAMES 2\r\n", b""])
async def test_a_server_that_does_not_speak_frames_is_known(answer: bytes) -> None:
    client = Client()
    for at in range(len(answer)):
        assert not client.connection.alive
        if not client.wire.closed:
            client.connection.data_received(answer[at : at + 1])
    if not answer:
        client.connection.connection_lost(None)
    assert await client.connection.opened is False


async def test_the_answer_to_the_preface_may_come_in_any_pieces() -> None:
    client = Client()
    _, got = client.ask()
    encoder = FrameEncoder()
    encoder.add(frames.HEAD, 1, HEAD)
    encoder.add(frames.END, 1, b"x")
    for byte in frames.ACCEPTED + encoder.take():
        client.connection.data_received(bytes([byte]))
    assert await client.connection.opened and client.connection.alive
    assert got.body == b"x"


@asynccontextmanager
async def server(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[tuple[FrameChannel, ConnectionPool]]:
    """A channel to a server whose connections ``answer`` serves, and the way by HTTP."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except OSError:
            pass  # it was closed from the other end
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        pool = ConnectionPool(f"http://127.0.0.1:{port}", 0.2)
        channel = FrameChannel(pool, SECRET)
        yield channel, pool
        channel.leave()
        await asyncio.sleep(0.05)  # both ends see it


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n"])
async def test_an_older_replica_and_one_with_another_secret_are_reached_over_http(answer: bytes) -> None:
    heads: list[bytes] = []

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readline())
        if heads[-1].startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await reader.read()
        else:
            writer.write(answer)

    async with server(old) as (channel, pool):
        connection = await channel.connect()
        assert isinstance(connection, Http1ClientConnection) and channel.take() is None
        got = Got()
        connection.send(got, b"GET / HTTP/1.1\r\n\r\n", b"")
        await until(lambda: got.complete)
        assert got.body == b"ok" and heads[0] == frames.preface(SECRET)
        assert pool.take() is connection  # it is kept for requests
        connection.kill()


async def test_a_replica_that_answers_late_gets_requests_once_it_does() -> None:
    """Until then its load stream waits, and other requests go over HTTP."""
    may_answer = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        writer.write(frames.ACCEPTED)
        await reader.read()

    async with server(slow) as (channel, pool):
        load = await channel.connect()
        got = Got()
        load.send(got, b"GET / HTTP/1.1\r\n\r\n", b"")
        assert channel.take() is None
        may_answer.set()
        await until(lambda: channel.take() is not None)
        pool.give(await pool.connect())
        again = await channel.connect()  # the connection before ends with its last stream
        assert pool.take() is None
        assert again is not load and not got.lost
        load.abort(got)


async def test_a_load_stream_that_is_given_up_while_it_connects_leaves_nothing() -> None:
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        connecting.cancel()
        await reader.read()
        ended.set()

    async with server(silent) as (channel, _):
        connecting = asyncio.create_task(channel.connect())
        await asyncio.wait({connecting})
        await asyncio.wait_for(ended.wait(), 10)
