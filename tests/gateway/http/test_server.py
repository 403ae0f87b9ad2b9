"""The client port on raw sockets: valid and invalid HTTP/1.1, timeouts, and the drain of a worker."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import json
import os
import re
import resource
import socket
import ssl
import struct
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from time import monotonic

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from gateway.http.asgi_exchange import SENT, AsgiExchange
from gateway.http.read_turns import MOST_CLOSED, STARTS_S, read_turns
from gateway.http.server import (
    SWEPT_AT_ONCE,
    HttpServer,
    connections_within_limit,
)
from gateway.http.server_connection import (
    HEADER_OVERHEAD,
    MAX_AHEAD,
    MAX_AHEAD_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIECE,
    ServerConnection,
    ServerTimeouts,
)
from gateway.http.upload_budget import UploadBudget
from gateway.routing.shared_counters import LOCAL
from tests.gateway.fake_replica import reset
from tests.gateway.http.memory_client import MemoryClient
from tests.gateway.worker import until

CAP = 300_000
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the whole request."""
    message = await receive()
    echoed = {
        "method": scope["method"],
        "path": scope["path"],
        "query": scope["query_string"].decode(),
        "sender": [scope["client"][0], scope["scheme"]],
        "headers": [[name.decode(), value.decode("latin-1")] for name, value in scope["headers"]],
        "body": message["body"].decode("latin-1"),
    }
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1")]})
    await send({"type": "http.response.body", "body": json.dumps(echoed).encode()})


class Port:
    """A server on its own port; a test sets its app. ``tls``: that of the server and of its clients."""

    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None

    def __init__(self) -> None:
        self.app: App = echo
        self.limit = CAP
        self.budget = 100 * CAP
        self.address_budget: int | None = None
        self.refused: list[bytes] = []
        self.refusal_headers: Callable[[dict[bytes, bytes]], list[tuple[bytes, bytes]]] = lambda received: []
        self.server: HttpServer
        self.port = 0
        self._opened: list[asyncio.StreamWriter] = []

    def make(self, *, times: ServerTimeouts | None = None, max_connections: int | None = None) -> None:
        """The server, which accepts no connections yet."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.app(scope, receive, send)

        self.server = HttpServer(
            app,
            lambda scope: self.limit,
            lambda refused, scope, request_id: self.refused.append(request_id),
            LOCAL,
            UploadBudget(lambda: (self.budget, self.address_budget or self.budget)),
            times=times,
            max_connections=max_connections,
            refusal_headers=self.refusal_headers,
        )

    async def listen(self) -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        await self.server.start(sock, None if self.tls is None else lambda: self.tls[0])

    async def start(self, *, times: ServerTimeouts | None = None, max_connections: int | None = None) -> None:
        self.make(times=times, max_connections=max_connections)
        await self.listen()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self.port:
            await self.start()
        tls = None if self.tls is None else self.tls[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        self._opened.append(writer)
        return reader, writer

    async def ask(self, data: bytes) -> bytes:
        """Everything that comes back for ``data`` until the server closes."""
        reader, writer = await self.open()
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 10)

    async def close(self) -> None:
        for writer in self._opened:
            writer.close()
        if self.port:
            await self.server.drain(0.01)


class Turns:
    """``counted`` is how often something happened in each turn of the loop, from :meth:`begin`."""

    def __init__(self) -> None:
        self.counted: Counter[int] = Counter()
        self._turn = 0

    def begin(self) -> None:
        self._turn += 1
        asyncio.get_running_loop().call_soon(self.begin)

    def count(self) -> None:
        self.counted[self._turn] += 1


def on_uvloop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on the loop that the server wants, with a port that starts when it is first used."""

    async def run(**given: object) -> None:
        port = Port()
        try:
            await test(port, **given)
        finally:
            await port.close()

    @functools.wraps(test)
    def ran(**given: object) -> None:
        uvloop.run(run(**given))

    signature = inspect.signature(test)
    wanted = [parameter for name, parameter in signature.parameters.items() if name != "port"]
    ran.__signature__ = signature.replace(parameters=wanted)  # type: ignore[attr-defined]
    return ran


def post(body: bytes = b"", *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST /a?b=c HTTP/" + version, b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


CLOSE = b"connection: close"
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def answers(data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """The answers in ``data``: status, headers, body."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while (match := re.match(rb"([0-9a-f]+)\r\n", data)) is not None:
                size = int(match[1], 16)
                body += data[match.end() : match.end() + size]
                data = data[match.end() + size + 2 :]
                if not size:
                    break
        else:
            size = int(headers.get("content-length", len(data)))
            body, data = data[:size], data[size:]
        found.append((int(lines[0].split()[1]), headers, body))
    return found


@on_uvloop
async def test_a_request_reaches_the_app_unchanged(port: Port) -> None:
    ((status, headers, body),) = answers(await port.ask(post(b"hello", b"X-Ab: Cd", CLOSE)))
    got = json.loads(body)
    assert (status, headers["x-a"], headers["connection"]) == (200, "1", "close")
    assert (got["method"], got["path"], got["query"], got["body"]) == ("POST", "/a", "b=c", "hello")
    assert ["x-ab", "Cd"] in got["headers"]
    assert "date" in headers


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 600) | st.integers(0, 9000), max_size=12),
    chunked=st.booleans(),
    wanted=st.booleans(),
)
def test_requests_are_parsed_alike_however_their_bytes_are_cut(
    cuts: list[int], chunked: bool, wanted: bool
) -> None:
    bodies = [b"x" * 90, b"", b"\r\n\r\n" * 2000, b"y" * 40]
    if not wanted:
        chunked = False
    data = b""
    for i, body in enumerate(bodies):
        last = (CLOSE,) if i == 3 else ()
        if chunked:
            head = b"\r\n".join([CHUNKED[:-4], *last]) + b"\r\n\r\n"
            data += head + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
        else:
            data += post(body, *last)

    async def ask() -> bytes:
        port = Port()
        port.limit = CAP if wanted else 0
        await port.start()
        reader, writer = await port.open()
        edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for a, b in itertools.pairwise(edges):
            writer.write(data[a:b])
            await asyncio.sleep(0)
        received = await asyncio.wait_for(reader.read(), 10)
        await port.close()
        return received

    received = answers(uvloop.run(ask()))
    expected = bodies if wanted else [b""] * len(bodies)
    assert [json.loads(body)["body"].encode() for _, _, body in received] == expected


@pytest.mark.parametrize("size", [CAP, 70_000])
@on_uvloop
async def test_a_large_body_arrives_whole(port: Port, size: int) -> None:
    body = os.urandom(size)
    both = await port.ask(post(body) + post(b"next", CLOSE))
    received = [json.loads(body)["body"] for _, _, body in answers(both)]
    assert received == [body.decode("latin-1"), "next"]


@on_uvloop
async def test_pipelined_requests_are_answered_in_order(port: Port) -> None:
    count = 3 * MAX_AHEAD
    data = b"".join(post(b"%d" % i) for i in range(count)) + post(b"last", CLOSE)
    received = [json.loads(body)["body"] for _, _, body in answers(await port.ask(data))]
    assert received == [*map(str, range(count)), "last"]


@on_uvloop
async def test_a_slow_answer_does_not_let_the_next_overtake(port: Port) -> None:
    release = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if len(scope["headers"]) == 2:
            await release.wait()
        await echo(scope, receive, send)

    port.app = app
    reader, writer = await port.open()
    writer.write(post(b"slow") + post(b"quick", CLOSE))
    await asyncio.sleep(0.01)
    release.set()
    received = [json.loads(body)["body"] for _, _, body in answers(await reader.read())]
    assert received == ["slow", "quick"]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\nab", 400),
        (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\nab", 400),
        (HEAD + b"content-length: +2\r\n\r\nab", 400),
        (HEAD + b"content-length: 2, 2\r\n\r\nab", 400),
        (HEAD + b"transfer-encoding: chunked, x\r\n\r\n0\r\n\r\n", 400),
        (CHUNKED + b"zz\r\n", 400),
        (b"POST / HTTP/1.1\nhost: x\n\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\ncontent-length: 0\r\n\r\n", 400),
        (HEAD + b" folded: y\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nho st: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\x00b\r\n\r\n", 400),
        (b"POST /\x01 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"POST / HTTP/3.7\r\n\r\n", 400),
        (b"NONSENSE\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n\r\n", 400),
        (HEAD + b"host: x\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n", 400),
        *(
            (b"POST / HTTP/1.1\r\nhost: %b\r\n\r\n" % host, 400)
            for host in (b"[::::]", b"[1.2.3.4]", b"[:]:80", b"a:65536", b"[::1]:99999", b"a:" + b"9" * 400)
        ),
        *(
            (b"POST / HTTP/1.1\r\nhost: %b\r\n\r\n" % host, 400)
            for host in (b"a b", b"a/b", b"a@b", b"a:b", b"a:1:2", b"[::1", b"a\xff", b"x?", b"[g]:1")
        ),
        (b"POST / HTTP/1.1\r\nhost: %b\r\n\r\n" % (b"a" * 513), 400),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 400),
        (HEAD + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
        (b"POST /" + b"y" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 431),
        (HEAD + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
        (HEAD + b"content-length: 300001\r\n\r\n", 413),
        (HEAD + b"content-length: 300001\r\nexpect: 100-continue\r\n\r\n", 413),
        (HEAD + b"content-length: 99999999999999999999999\r\n\r\n", 400),
        (CHUNKED + b"50000\r\n" + b"x" * 0x50000 + b"\r\n", 413),
    ],
)
@pytest.mark.parametrize("before", [b"", post(b"fine")], ids=["first", "after another"])
@on_uvloop
async def test_invalid_requests_are_refused(port: Port, data: bytes, status: int, before: bytes) -> None:
    received = answers(await port.ask(before + data + post(b"smuggled")))
    assert [answer[0] for answer in received] == ([200] if before else []) + [status]
    _, headers, body = received[-1]
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert headers["connection"] == "close"
    assert [headers["x-request-id"].encode()] == port.refused
    assert len(body) < 4096


NAMED = b"origin: https://app.example\r\nx-request-id: mine\r\n"


@pytest.mark.parametrize(
    ("data", "origin"),
    [
        (HEAD + NAMED + b"content-length: 300001\r\n\r\n", "https://app.example"),
        (
            HEAD + NAMED + b"transfer-encoding: chunked\r\n\r\n50000\r\n" + b"x" * 0x50000,
            "https://app.example",
        ),
        (HEAD + NAMED + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n", "https://app.example"),
        (HEAD + NAMED + b"x: " + b"y" * 2 * MAX_HEAD_BYTES, "https://app.example"),
        (b"POST / HTTP/1.1\r\n" + NAMED + b"\r\n", "https://app.example"),
        (HEAD + b"content-length: 300001\r\n\r\n", "none"),
        (b"POST / HTTP/1.1\r\nhost: x\r\n" + NAMED + b"content-length: 0\r\n\r\nNONSENSE\r\n\r\n", "none"),
    ],
    ids=["length", "body", "many headers", "long head", "no host", "no origin", "of the request before"],
)
@on_uvloop
async def test_a_refusal_has_headers_for_those_of_its_request(port: Port, data: bytes, origin: str) -> None:
    port.refusal_headers = lambda received: [(b"x-origin", received.get(b"origin", b"none"))]
    _, headers, _ = answers(await port.ask(data))[-1]
    assert headers["x-origin"] == origin
    assert (headers["x-request-id"] == "mine") == (origin != "none")
    assert port.refused == [headers["x-request-id"].encode()]


@pytest.mark.parametrize(
    "data",
    [b"", HEAD + b"x: y", post(b"x" * CAP)[:-10], post(b"x"), post(b"x") * 9, b"NONSENSE\r\n\r\n"],
    ids=["nothing", "half a head", "half a body", "a request", "pipelined requests", "no HTTP"],
)
@on_uvloop
async def test_a_lost_connection_is_freed_without_a_collection(port: Port, data: bytes) -> None:
    def connections() -> int:
        return sum(type(each) is ServerConnection for each in gc.get_objects())  # others may compute a class

    gc.collect()
    gc.disable()
    try:
        _, writer = await port.open()
        await until(lambda: connections() == 1)
        writer.write(data)
        writer.close()
        await until(lambda: connections() == 0, "it is freed")
    finally:
        gc.enable()


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("size", [0, 9, 200_000])
@on_uvloop
async def test_an_upgrade_offer_is_served_as_http_1_1(port: Port, protocol: bytes, size: int) -> None:
    body = b"x" * size
    offer = post(body, b"connection: upgrade", b"upgrade: " + protocol)
    received = [json.loads(body)["body"] for _, _, body in answers(await port.ask(offer + post(b"y", CLOSE)))]
    assert received == [body.decode(), "y"]


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (HEAD + b"x: ", b"y" * 4096),
        (CHUNKED, b"1;" + b"e" * 65_536 + b"\r\nx\r\n"),
        (CHUNKED, b"1\r\nx\r\n" * 10_000),
    ],
    ids=["a head without end", "long chunk extensions", "tiny chunks"],
)
@on_uvloop
async def test_endless_heads_and_framing_are_refused(port: Port, begin: bytes, more: bytes) -> None:
    reader, writer = await port.open()
    writer.write(begin)
    for _ in range(40):
        writer.write(more)
        await asyncio.sleep(0.001)
    assert answers(await reader.read())[0][0] == (400 if begin == CHUNKED else 431)


@pytest.mark.parametrize("sizes", [[1], [1, 2000], [3000, 1, 1], [70_000, 5]])
@on_uvloop
async def test_a_body_in_chunks_of_any_size_arrives_whole(port: Port, sizes: list[int]) -> None:
    body = os.urandom(100_000)
    chunks, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= len(body):
            break
        chunks.append(b"%x\r\n%b\r\n" % (len(part := body[at : at + size]), part))
        at += size
    answer = await port.ask(CHUNKED + b"".join(chunks) + b"0\r\n\r\n" + post(b"next", CLOSE))
    assert [json.loads(body)["body"] for _, _, body in answers(answer)] == [body.decode("latin-1"), "next"]


@on_uvloop
async def test_tiny_chunks_take_no_more_memory_than_their_body(port: Port) -> None:
    chunks = CHUNKED + b"2\r\nxx\r\n" * (CAP // 4)
    tracemalloc.start()
    try:
        _, writer = await port.open()
        writer.write(chunks)
        await writer.drain()
        await until(lambda: not writer.transport.get_write_buffer_size())
        await asyncio.sleep(0.05)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * CAP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "ahead"),
    [
        (b"", MAX_AHEAD + MAX_PIECE // 30),
        (b"connection: upgrade\r\nupgrade: h2c\r\n", MAX_AHEAD + MAX_PIECE // 60),
        (b"y: %b\r\n" % (b"z" * 9000), MAX_AHEAD_BYTES // 9000 + 2),
        (b"y:\r\n" * 90, MAX_AHEAD_BYTES // (90 * HEADER_OVERHEAD) + 2),
    ],
    ids=["short heads", "upgrades", "long heads", "many headers"],
)
@on_uvloop
async def test_many_pipelined_requests_take_little(port: Port, more: bytes, ahead: int) -> None:
    one = b"GET / HTTP/1.1\r\nhost: x\r\n" + more + b"\r\n"
    count = 150_000 // len(one)
    most = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal most
        if not most:
            await asyncio.sleep(0.02)
            most = sum(type(each) is AsgiExchange for each in gc.get_objects())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    port.app = app
    received = answers(await port.ask(one * count + post(b"last", CLOSE)))
    assert [status for status, _, _ in received] == [200] * (count + 1)
    assert 0 < most <= ahead


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"y:\r\n" * 8000,
        b"".join(b"GET /%d%b HTTP/1.1\r\nhost: x\r\n\r\n" % (i, b"z" * 30_000) for i in range(20)),
    ],
    ids=["many headers", "long targets"],
)
@on_uvloop
async def test_of_long_heads_little_is_kept(port: Port, data: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    port.app = app
    read_turns()  # with the buffer of all reads
    _, writer = await port.open()
    tracemalloc.start()
    try:
        writer.write(data)
        await until(lambda: not writer.transport.get_write_buffer_size())
        await asyncio.sleep(0.05)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200_000


@on_uvloop
async def test_requests_of_many_clients_that_come_at_once_begin_in_many_turns(port: Port) -> None:
    turns = Turns()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        turns.count()
        until_s = monotonic() + STARTS_S / 4
        while monotonic() < until_s:
            pass
        await echo(scope, receive, send)

    port.app = app
    clients = [await port.open() for _ in range(60)]
    turns.begin()
    for _, writer in clients:
        writer.write(post(b"x", CLOSE))
    for reader, _ in clients:
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")
    assert turns.counted.total() == len(clients)
    # A turn of the loop may have parts of two of the server's.
    assert max(turns.counted.values()) <= 2 * 6


@on_uvloop
async def test_requests_of_many_clients_that_reset_at_once_are_cancelled_in_many_turns(port: Port) -> None:
    began, turns = 0, Turns()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal began
        began += 1
        try:
            await asyncio.sleep(60)
        finally:
            turns.count()

    port.app = app
    clients = [await port.open() for _ in range(3 * MOST_CLOSED)]
    for _, writer in clients:
        writer.write(post(b"x"))
    await until(lambda: began == len(clients))
    turns.begin()
    for _, writer in clients:
        reset(writer.transport)
    await until(lambda: turns.counted.total() == len(clients))
    assert max(turns.counted.values()) <= MOST_CLOSED


@on_uvloop
async def test_trailers_are_ignored(port: Port) -> None:
    data = HEAD + b"transfer-encoding: chunked\r\n%b\r\n\r\n1\r\nx\r\n0\r\nx-evil: 1\r\n\r\n" % CLOSE
    ((status, _, body),) = answers(await port.ask(data))
    assert status == 200
    assert "x-evil" not in body.decode()


@on_uvloop
async def test_a_refused_body_is_read_so_that_the_answer_arrives(port: Port) -> None:
    ((status, headers, _),) = answers(await port.ask(post(b"x" * 3_000_000, b"x-request-id: mine")))
    assert (status, headers["x-request-id"], port.refused) == (413, "mine", [b"mine"])


@pytest.mark.parametrize(
    ("framing", "keeps"),
    [
        (b"content-length: 5", True),
        (b"content-length: 5\r\nexpect: 100-continue", False),
        (b"content-length: 9999999", False),
        (b"transfer-encoding: chunked", False),
    ],
)
@on_uvloop
async def test_a_request_is_answered_before_a_body_that_the_app_does_not_want(
    port: Port, framing: bytes, keeps: bool
) -> None:
    port.limit = 0
    reader, writer = await port.open()
    writer.write(HEAD + framing + b"\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert (b"connection: close" not in head) is keeps
    writer.write(b"hello" + post(b"", CLOSE))
    assert (await reader.read()).count(b"HTTP/1.1 200") == keeps


@pytest.mark.parametrize("target", ["", "?beta=true", "/batches", "/count_tokens?x"])
@on_uvloop
async def test_a_refusal_under_the_messages_route_has_anthropics_envelope(port: Port, target: str) -> None:
    head = f"POST /v1/messages{target} HTTP/1.1\r\nhost: x\r\ncontent-length: 300001\r\n\r\n"
    ((_, headers, body),) = answers(await port.ask(head.encode()))
    assert json.loads(body)["type"] == "error"
    assert headers["request-id"] == headers["x-request-id"]


@on_uvloop
async def test_expect_100_continue_is_answered(port: Port) -> None:
    reader, writer = await port.open()
    head, _, body = post(b"hello", b"expect: 100-continue", CLOSE).partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert json.loads(answers(await reader.read())[0][2])["body"] == "hello"


@pytest.mark.parametrize(
    "line",
    [
        b"1.0",
        *(b"1.1\r\nhost: " + host for host in (b"", b"x", b"a.b-c_d:80", b"10.0.0.1:8080", b"[::1]:80")),
        *(b"1.1\r\nhost: " + host for host in (b"[::ffff:1.2.3.4]", b"x:", b"x:65535", b"x:00000080")),
    ],
)
@on_uvloop
async def test_a_valid_host_or_none_of_http_1_0_is_served(port: Port, line: bytes) -> None:
    received = await port.ask(b"GET / HTTP/%b\r\nconnection: close\r\n\r\n" % line)
    assert answers(received)[0][0] == 200


@on_uvloop
async def test_http_1_0_keep_alive_is_supported(port: Port) -> None:
    stay = post(b"x", b"connection: keep-alive", version=b"1.0")
    received = answers(await port.ask(stay + post(b"y", version=b"1.0")))
    assert [headers["connection"] for _, headers, _ in received] == ["keep-alive", "close"]


@on_uvloop
async def test_head_has_no_body(port: Port) -> None:
    received = await port.ask(b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    assert body == b""
    assert b"content-length: " in head


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@on_uvloop
async def test_a_stream_is_chunked_for_http_1_1_only(port: Port, version: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"a", b"", b"bc"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"d"})

    port.app = app
    ((_, headers, body),) = answers(await port.ask(post(b"", CLOSE, version=version)))
    assert body == b"abcd"
    assert ("transfer-encoding" in headers) is (version == b"1.1")


@on_uvloop
async def test_an_incomplete_response_resets_the_connection(port: Port) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    port.app = app
    reader, writer = await port.open()
    writer.write(post())
    with pytest.raises(ConnectionResetError):
        if (await reader.read()).endswith(b"0\r\n\r\n"):
            return
        raise ConnectionResetError


@on_uvloop
async def test_a_client_disconnect_cancels_its_task(port: Port) -> None:
    seen: list[str] = []
    begun = asyncio.Event()
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append((await receive())["type"])
            seen.append(str(scope["tidegate.exchange"].disconnected))
            ended.set()
            raise

    port.app = app
    _, writer = await port.open()
    writer.write(post(b"x"))
    await begun.wait()
    writer.close()
    await asyncio.wait_for(ended.wait(), 5)
    assert seen == ["http.disconnect", "True"]


@on_uvloop
async def test_a_slow_reader_makes_its_sender_wait_and_is_bounded(port: Port) -> None:
    sent = 0
    waited = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            waiting = send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            if waiting is not SENT:
                waited.set()
            await waiting
            sent += 65536
        await send({"type": "http.response.body"})

    port.app = app
    reader, writer = await port.open()
    writer.write(post(b"", CLOSE))
    await asyncio.wait_for(waited.wait(), 10)
    assert sent < 32 * 1024 * 1024
    assert len(await reader.read()) > 65536 * 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "status"),
    [(b"POST / HT", 408), (HEAD + b"content-length: 9\r\n\r\nab", 408), (b"", None)],
    ids=["head", "body", "nothing"],
)
@on_uvloop
async def test_slow_senders_time_out(port: Port, data: bytes, status: int | None) -> None:
    await port.start(times=ServerTimeouts(0.2, 0.2, 0.2, 0.2, 0.2))
    received = answers(await port.ask(data))
    assert [answer[0] for answer in received] == ([] if status is None else [status])


@pytest.mark.slow
@on_uvloop
async def test_a_body_that_arrives_steadily_may_take_long(port: Port) -> None:
    await port.start(times=ServerTimeouts(body_s=0.5, linger_s=0.4))
    reader, writer = await port.open()
    data = post(b"x" * CAP, CLOSE)
    for at in range(0, len(data), CAP // 20):
        writer.write(data[at : at + CAP // 20])
        await asyncio.sleep(0.1)
    assert answers(await reader.read())[0][0] == 200


@pytest.mark.slow
@on_uvloop
async def test_a_stalled_upload_gives_way_to_one_that_is_sent(port: Port) -> None:
    port.budget = 2 * CAP
    await port.start(times=ServerTimeouts(linger_s=0.4))
    stalled, writer = await port.open()
    writer.write(post(b"x" * CAP)[:-10])
    await asyncio.sleep(0.05)
    ((status, _, body),) = answers(await port.ask(post(b"y" * CAP, CLOSE)))
    assert (status, len(json.loads(body)["body"])) == (200, CAP)
    assert answers(await stalled.read())[0][0] == 408


@on_uvloop
@pytest.mark.parametrize("resets", [False, True])
async def test_an_upload_that_is_not_read_ends_when_its_client_leaves(port: Port, resets: bool) -> None:
    port.budget = 2 * CAP
    port.make()
    read = MemoryClient(port.server)
    await read.send(post(b"x" * CAP)[:-10])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        sock, _ = listening.accept()
    with client, sock:
        held_back = MemoryClient(port.server, sock)
        await held_back.send(post(b"x" * CAP)[:20_000])
        held_back.connection.sweep(port.server.now)
        assert not held_back.closed
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        held_back.connection.sweep(port.server.now)
        read.connection.sweep(port.server.now)
        assert (held_back.closed, read.closed) == (True, False)
        held_back.connection.connection_lost(None)
        held_back.connection.sweep(port.server.now)
    await read.send(b"x" * 10)
    await until(lambda: b"HTTP/1.1 200" in read.received)


@on_uvloop
async def test_a_client_that_sent_much_behind_a_running_request_and_left_is_noticed(port: Port) -> None:
    """Its connection is not read while so much waits, so the end was not seen before the answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    port.app = app
    port.make()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        sock, _ = listening.accept()
    with client, sock:
        ahead = MemoryClient(port.server, sock)
        await ahead.send(post() + post(b"x" * 2 * MAX_AHEAD_BYTES))
        ahead.connection.sweep(port.server.now)
        assert not ahead.closed
        client.close()
        ahead.connection.sweep(port.server.now)
        assert ahead.closed
        ahead.connection.connection_lost(None)


@on_uvloop
async def test_complete_bodies_are_bounded_until_the_app_has_read_them(port: Port) -> None:
    """Each was forgotten when it was complete: 150 bodies of 16 MB for an unknown model were held at once."""
    size = 2 * 1024 * 1024
    port.limit, port.budget = size, 4 * size
    begun: list[int] = []
    release = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        if body:
            begun.append(len(body))
            await release.wait()
            scope["tidegate.exchange"].body_checked()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    port.app = app
    asking = [asyncio.create_task(port.ask(post(b"x" * size, CLOSE))) for _ in range(12)]
    await until(lambda: bool(begun))
    for _ in range(20):  # all that is read without waiting is read meanwhile
        await port.ask(post(b"", CLOSE))
    assert sum(begun) <= port.budget
    release.set()
    assert [answers(data)[0][0] for data in await asyncio.gather(*asking)] == [200] * 12


@pytest.mark.slow
@on_uvloop
async def test_little_is_read_ahead_of_the_current_request(port: Port) -> None:
    release = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % len((await receive())["body"])})

    port.app, port.limit = app, 1 << 26
    reader, writer = await port.open()
    size = 1 << 25
    writer.write(post(b"x") + post(b"y" * size, CLOSE))
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert writer.transport.get_write_buffer_size() > size // 2
    release.set()
    assert [body for _, _, body in answers(await reader.read())] == [b"1", b"%d" % size]


@on_uvloop
async def test_many_connections_are_swept_in_several_turns_of_the_loop(port: Port) -> None:
    port.make(max_connections=1000)
    clients = [MemoryClient(port.server) for _ in range(1000)]
    for client in clients:
        client.connection.deadline = 0.0
    # It sweeps when it begins to listen.
    await port.listen()
    closed = [0]
    while closed[-1] < len(clients):
        closed.append(sum(client.closed for client in clients))
        await asyncio.sleep(0)
    assert max(now - before for before, now in itertools.pairwise(closed)) == SWEPT_AT_ONCE
    for client in clients:
        client.connection.connection_lost(None)


@on_uvloop
async def test_a_connection_may_be_lost_before_it_is_swept(port: Port) -> None:
    port.make()
    client = MemoryClient(port.server)
    client.connection.connection_lost(None)
    client.connection.deadline = 0.0
    client.connection.sweep(port.server.now)
    assert (port.server.connections, client.closed) == (0, False)


@pytest.mark.slow
@on_uvloop
async def test_stalled_readers_time_out_and_slow_ones_do_not(port: Port) -> None:
    await port.start(times=ServerTimeouts(0.3, 0.3, 0.3, 0.3, 0.3))
    gone = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        finally:
            gone.set()

    port.app = app
    reader, writer = await port.open()
    writer.write(post())
    for _ in range(5):
        await reader.readexactly(1_000_000)
        await asyncio.sleep(0.1)
    assert not gone.is_set()
    await asyncio.wait_for(gone.wait(), 10)


@on_uvloop
async def test_clients_that_do_not_read_whole_answers_are_bounded(port: Port) -> None:
    """Each answer was held for a minute: a thousand of 2 MB took 2 GB. Who reads gets all of it."""
    answer = b"x" * 8 * 1024 * 1024
    port.budget = 2 * len(answer)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    port.app = app
    for _ in range(16):
        _, stalled = await port.open()
        stalled.write(post())
    reader, writer = await port.open()
    writer.write(post())
    received = 0
    while received < len(answer):
        received += len(await asyncio.wait_for(reader.read(64 * 1024), 20))
        await asyncio.sleep(0.02)
    await until(lambda: port.server.connections < 12)
    assert not writer.is_closing()


@on_uvloop
async def test_connections_beyond_the_limit_get_503(port: Port) -> None:
    await port.start(max_connections=1)
    first, writer = await port.open()
    ((status, headers, _),) = answers(await port.ask(post()))
    assert (status, headers["retry-after"]) == (503, "1")
    writer.write(post(b"x", CLOSE))
    assert answers(await first.read())[0][0] == 200
    await asyncio.sleep(0.01)
    assert answers(await port.ask(post(b"y", CLOSE)))[0][0] == 200


@on_uvloop
async def test_a_drain_serves_requests_in_flight_and_new_connections_and_closes_idle_ones(port: Port) -> None:
    release = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await release.wait()
        await echo(scope, receive, send)

    idle, idle_writer = await port.open()
    idle_writer.write(post())
    await idle.readuntil(b"}")
    running, writer = await port.open()
    port.app = app
    writer.write(post(b"x"))
    await asyncio.sleep(0.01)
    accepted, accepted_writer = await port.open()
    draining = asyncio.create_task(port.server.drain(10))
    await idle.read()
    assert idle.at_eof()
    with pytest.raises(ConnectionRefusedError):
        await port.open()
    accepted_writer.write(post(b"y"))
    release.set()
    for reader in (running, accepted):
        ((status, headers, _),) = answers(await reader.read())
        assert (status, headers["connection"]) == (200, "close")
    await draining


@pytest.mark.slow
@on_uvloop
async def test_a_drain_closes_connections_that_never_send_a_request(port: Port) -> None:
    await port.start(times=ServerTimeouts(head_s=0.1))
    reader, _ = await port.open()
    draining = asyncio.create_task(port.server.drain(10))
    assert await asyncio.wait_for(reader.read(), 5) == b""
    await draining


@on_uvloop
async def test_a_drain_timeout_lets_a_stream_end_with_an_error(port: Port) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            assert not scope["tidegate.exchange"].disconnected
            await send({"type": "http.response.body", "body": b" cut"})
            raise

    port.app = app
    reader, writer = await port.open()
    writer.write(post())
    await reader.readuntil(b"a\r\n")
    draining = asyncio.create_task(port.server.drain(0.02))
    assert b" cut\r\n0\r\n\r\n" in await reader.read()
    await draining


def test_clients_leave_descriptors_for_replicas() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < connections_within_limit() <= max(1, soft // 2)


@on_uvloop
async def test_a_trusted_proxy_names_the_client_whose_upload_it_is(port: Port) -> None:
    """The proxy's own address has no room for another upload; the client that it names has."""
    port.limit, port.address_budget = 1_000_000, 100_000
    port.make()
    own = MemoryClient(port.server)
    await own.send(post(b"x" * 90_000)[:-10])
    request = post(b"x" * 400_000, b"x-forwarded-for: 203.0.113.7\r\nx-forwarded-proto: https")
    for trusted in ([], ["127.0.0.0/8"]):
        port.server.proxies.read(trusted)
        client = MemoryClient(port.server)
        await client.send(request[:20])  # counted to the other end, until the head is complete
        await client.send(request[20:])
        await until(lambda client=client: bool(client.received))
        ((status, _, body),) = answers(client.received)
        assert status == (200 if trusted else 503)
        if trusted:
            assert json.loads(body)["sender"] == ["203.0.113.7", "https"]
    await own.send(b"x" * 10)
    await until(lambda: bool(own.received))
    ((status, _, body),) = answers(own.received)
    assert (status, json.loads(body)["sender"]) == (200, ["127.0.0.1", "http"])
