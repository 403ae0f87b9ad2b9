"""The replica's end of frames: who may speak them, what breaks a connection, and what ends a stream alone."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from policy.wire import frames
from policy.wire.frames import MAX_PAYLOAD, WINDOW_BYTES, FrameDecoder, FrameEncoder, Record
from serve.engine.engine_server import HttpOrFramesProtocol
from serve.engine.frame_server import MAX_KEPT
from serve.engine.interface import WRITER, ASGIApp, Receive, ResponseWriter, Scope, Send
from tests.frame_pair import EVENTS, SECRET, Pair, Wire, written

HEAD = b"POST /v1/x?a=%20b HTTP/1.1\r\nA: b\r\n"
PLAIN = [(b"content-type", b"text/plain"), (b"content-length", b"2")]


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": PLAIN})
    await send({"type": "http.response.body", "body": b"hi"})


async def waits(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Port:
    """A connection to a replica's port, whose other end the test plays."""

    def __init__(self, app: ASGIApp = waits, *, limit: int = 1 << 30) -> None:
        self.wire = Wire(limit)
        self.state = ServerState()
        config = uvicorn.Config(app, log_config=None)
        self._encoder, self._decoder = FrameEncoder(), FrameDecoder()
        made = HttpOrFramesProtocol(app, SECRET, config=config, server_state=self.state, app_state={})
        self.wire.set_protocol(made)
        made.connection_made(cast("asyncio.Transport", self.wire))

    def feed(self, data: bytes) -> None:
        self.wire.protocol.data_received(data)

    def accept(self) -> Port:
        self.feed(frames.preface(SECRET))
        assert self.wire.take() == frames.ACCEPTED
        return self

    def play(self, *records: Record) -> None:
        for record in records:
            self._encoder.add(*record)
        self.feed(self._encoder.take())

    async def sent(self, turns: int = 5) -> list[Record]:
        records = []
        for _ in range(turns):
            await asyncio.sleep(0)
            records += self._decoder.feed(self.wire.take())
            self._decoder.check()
        return records


def request(number: int = 1, body: bytes = b"", head: bytes = HEAD) -> list[Record]:
    head += b"content-length: %d\r\n\r\n" % len(body)
    return [(frames.REQUEST, number, head), *([(frames.BODY, number, body)] if body else [])]


async def test_frames_and_http_share_a_port() -> None:
    """However their first bytes are cut; an older replica answers a preface as one with another method."""
    for step in (1, 7, 1000):
        asked, port = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n", Port(hello)
        for at in range(0, len(asked), step):
            port.feed(asked[at : at + step])
        for _ in range(5):
            await asyncio.sleep(0)
        assert port.wire.take().startswith(b"HTTP/1.1 200 OK\r\n")
        port = Port(hello)
        encoder = FrameEncoder()
        for record in request():
            encoder.add(*record)
        asked = frames.preface(SECRET) + encoder.take()
        for at in range(0, len(asked), step):
            port.feed(asked[at : at + step])
        await asyncio.sleep(0)
        assert port.wire.take(len(frames.ACCEPTED)) == frames.ACCEPTED
        assert await port.sent() == [(frames.HEAD, 1, frames.head(200, PLAIN)), (frames.END, 1, b"hi")]
    port = Port(hello)
    port.feed(b"TRACE")
    port.feed(b"-ROUTE / HTTP/1.1\r\n\r\n")
    assert port.wire.take().startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "preface",
    [
        frames.preface("another"),
        frames.preface(SECRET + "x"),
        frames.preface(SECRET).replace(b" 1 ", b" 2 "),
        frames.MAGIC + b"\r\n",
        frames.MAGIC + b"x" * frames.MAX_PREFACE,
        frames.MAGIC + b"1 \xff\r\n",
    ],
    ids=["another secret", "a longer secret", "another version", "nothing", "no end", "no text"],
)
@pytest.mark.parametrize("cut", [False, True])
async def test_only_a_gateway_is_admitted_and_others_leave_no_trace(
    preface: bytes, cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    port = Port()
    for part in [bytes([byte]) for byte in preface] if cut else [preface]:
        port.feed(part)
    port.feed(FrameEncoder().take() + b"more")
    assert port.wire.closed and not port.wire.written
    await asyncio.sleep(0)
    assert not (port.state.connections or port.state.tasks or caplog.records)


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(request(1), id="a stream twice"),
        pytest.param(request(0), id="stream 0"),
        pytest.param([(frames.BODY, 3, b"")], id="a body of no request"),
        pytest.param([(frames.BODY, 1, b"toolong")], id="a body longer than its head says"),
        pytest.param([(frames.WINDOW, 1, b"1")], id="half a window"),
        pytest.param([(frames.HEAD, 1, b"")], id="a kind that only replicas send"),
        pytest.param(request(3, head=b"POST /x\r\n"), id="no version"),
        pytest.param(request(3, head=b"POST /x HTTP/1.1\r\ncontent-length: x\r\n"), id="no length"),
        pytest.param(request(3, head=b"POST /x HTTP/1.1\r\ncontent-length: -1\r\n"), id="a negative length"),
        pytest.param(request(3, head=b"POST /\xff HTTP/1.1\r\n"), id="a path that is no text"),
        pytest.param(request(3, head=b"POST /x HTTP/1.1\r\nnothing\r\n"), id="no header"),
        pytest.param([], id="no frame"),
    ],
)  # fmt: skip
async def test_a_gateway_that_breaks_the_format_loses_its_connection(
    records: list[Record], caplog: pytest.LogCaptureFixture
) -> None:
    port, other = Port().accept(), Port(hello).accept()
    port.play(*request(1, b"part")[:1], *request(2))
    await asyncio.sleep(0)
    assert len(port.state.tasks) == 2
    if records:
        port.play(*records)
    else:
        port.feed(b"\xff" * 9)
    assert port.wire.closed
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    port.play(*request(9))  # read before the close
    for _ in range(5):
        await asyncio.sleep(0)
    assert not (port.state.connections or port.state.tasks)
    other.play(*request())
    assert (await other.sent())[-1] == (frames.END, 1, b"hi")


async def test_an_app_gets_the_request_as_over_http() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append([scope[name] for name in ("type", "method", "path", "query_string", "headers")])
        seen.append(await receive())
        await hello(scope, receive, send)

    port = Port(app).accept()
    port.play(*request(5, b"bo")[:1])
    await port.sent()
    assert len(seen) == 1  # it waits for the whole body
    port.play((frames.BODY, 5, b"b"), (frames.BODY, 5, b"o"))
    await port.sent()
    headers = [(b"a", b"b"), (b"content-length", b"2")]
    assert seen[0] == ["http", "POST", "/v1/x", b"a=%20b", headers]
    assert seen[1] == {"type": "http.request", "body": b"bo", "more_body": False}


async def test_records_of_a_stream_that_is_over_are_ignored() -> None:
    port = Port(hello).accept()
    port.play(*request(3))
    await port.sent()
    port.play((frames.BODY, 3, b"x"), (frames.WINDOW, 3, frames.credit(9)), (frames.CANCEL, 3, b""))
    port.play((frames.CANCEL, 1, b""))  # a number that was skipped
    assert await port.sent() == [] and not port.wire.closed


@pytest.mark.parametrize(
    "record", [(99, 3, b""), (frames.END, 3, b""), (frames.WINDOW, 3, b"1")], ids=["kind", "END", "window"]
)
async def test_no_wrong_record_passes_because_its_stream_is_over(record: Record) -> None:
    port = Port(hello).accept()
    port.play(*request(3))
    await port.sent()
    port.play(record)
    assert port.wire.closed


async def test_requests_that_arrive_before_what_is_no_frame_are_served() -> None:
    """As if it had come by itself: how the network cuts bytes decides nothing."""
    served: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        served.append(scope["path"])

    port, encoder = Port(app).accept(), FrameEncoder()
    for record in request():
        encoder.add(*record)
    port.feed(encoder.take() + b"\0\0\0\3\0\0\0\1")
    assert port.wire.closed
    await port.sent()
    assert served == ["/v1/x"]


async def test_send_waits_for_the_window() -> None:
    passed: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(4):
            await send(
                {"type": "http.response.body", "body": bytes(WINDOW_BYTES // 2 + 1), "more_body": True}
            )
            passed.append(number)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        passed.append(4)

    port = Port(app).accept()
    port.play(*request())
    records = await port.sent()
    assert sum(len(data) for kind, _, data in records if kind == frames.DATA) == WINDOW_BYTES
    assert passed == [0]
    port.play((frames.WINDOW, 1, frames.credit(3 * WINDOW_BYTES)))
    assert (await port.sent(20))[-1] == (frames.END, 1, b"")
    assert passed == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("last", [b"", b"last"])
@pytest.mark.parametrize("spent", [0, 1, WINDOW_BYTES])
async def test_the_end_of_a_response_comes_when_a_full_connection_has_room(last: bytes, spent: int) -> None:
    """Also where the window is spent to its last byte."""

    def serve(writer: ResponseWriter, body: bytes) -> None:
        writer.start(200, EVENTS)
        writer.write(bytes(spent))

        async def end() -> None:
            port.wire.protocol.pause_writing()
            writer.end(last)

        ending.append(asyncio.ensure_future(end()))

    ending: list[asyncio.Future[None]] = []
    port = Port(written(serve)).accept()
    port.play(*request())
    assert frames.END not in [kind for kind, _, _ in await port.sent(10)]
    port.wire.protocol.resume_writing()
    if last and spent == WINDOW_BYTES:
        assert await port.sent() == []
        port.play((frames.WINDOW, 1, frames.credit(4)))
    assert (await port.sent())[-1] == (frames.END, 1, last)
    assert not port.state.tasks


@pytest.mark.parametrize("begun", [False, True])
async def test_an_app_that_fails_ends_its_stream_alone(begun: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await hello(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if begun:
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise LookupError

    port = Port(app).accept()
    port.play(*request(1), *request(2, head=HEAD.replace(b"POST", b"GET")))
    records = await port.sent()
    assert records[-2:] == [(frames.HEAD, 2, frames.head(200, PLAIN)), (frames.END, 2, b"hi")]
    if begun:
        assert records[1:3] == [(frames.DATA, 1, b"a"), (frames.RESET, 1, b"")]
    else:
        assert frames.head_of(records[0][2])[0] == 500
        assert records[1] == (frames.END, 1, b"Internal Server Error")
    assert "a request failed" in caplog.text


@pytest.mark.parametrize("value", [b"", bytes(MAX_PAYLOAD), b"a\r\nb"], ids=["no end", "endless", "lines"])
async def test_a_response_without_an_end_or_with_a_wrong_head_breaks_alone(value: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", value)]})

    port = Port(app).accept()
    port.play(*request(1), *request(2))
    records = await port.sent()
    if value:
        assert {frames.head_of(data)[0] for kind, _, data in records if kind == frames.HEAD} == {500}
    else:
        assert records == [(frames.RESET, 1, b""), (frames.RESET, 2, b"")]


def left(told: list[str]) -> Callable[[ResponseWriter, bytes], None]:
    """Tells when the gateway left; the first callback fails."""

    def serve(writer: ResponseWriter, body: bytes) -> None:
        def fail() -> None:
            raise LookupError

        writer.start(200, EVENTS)
        writer.write(body)
        writer.on_abort(fail)
        writer.on_abort(lambda: told.append(body.decode()))

    return serve


@pytest.mark.parametrize("how", ["cancel", "lost", "broken"])
async def test_an_app_is_told_once_that_the_gateway_left(how: str) -> None:
    told: list[str] = []
    port = Port(written(left(told))).accept()
    port.play(*request(1, b"a"), *request(2, b"b"))
    await port.sent()
    if how == "cancel":
        port.play((frames.CANCEL, 1, b""))
        assert told == ["a"]
        port.play((frames.CANCEL, 1, b""), (frames.CANCEL, 2, b""))
    elif how == "lost":
        port.wire.close()
    else:
        port.feed(b"\xff" * 9)
    assert await port.sent() == []
    assert told == ["a", "b"]
    assert not port.state.tasks


async def test_a_response_that_nobody_reads_is_cut_alone(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def serve(writer: ResponseWriter, body: bytes) -> None:
        left(told)(writer, body)
        for _ in range(MAX_KEPT // WINDOW_BYTES + 2 if body == b"a" else 1):
            writer.write(bytes(WINDOW_BYTES))
        if body != b"a":
            writer.end(b"end")

    port = Port(written(serve)).accept()
    port.play(*request(1, b"a"), *request(2, b"b"))
    records = await port.sent()
    assert (frames.RESET, 1, b"") in records
    assert told == ["a"]
    assert "a response is cut" in caplog.text
    port.play((frames.WINDOW, 1, frames.credit(9)), (frames.WINDOW, 2, frames.credit(WINDOW_BYTES)))
    assert (await port.sent())[-1] == (frames.END, 2, b"\0end")
    assert not port.state.tasks


async def test_a_served_stream_is_freed_without_a_collection() -> None:
    held: list[weakref.ref[Any]] = []

    class Held(dict[str, Any]):
        """A part of a scope, to which a weak reference is possible."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        writer = scope["extensions"][WRITER]
        scope["state"] = Held()
        writer.on_abort(writer.end)
        held.extend((weakref.ref(writer), weakref.ref(scope["state"])))
        await hello(scope, receive, send)

    pair = Pair(app)
    gc.disable()
    try:
        _, got = pair.ask(b"x")
        await pair.turn(3)
        assert got.complete
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_server_that_stops_closes_connections_without_requests(busy: bool) -> None:
    port = Port().accept()
    if busy:
        port.play(*request())
    (connection,) = port.state.connections
    connection.shutdown()
    assert port.wire.closed is not busy
