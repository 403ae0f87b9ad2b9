"""A fake replica and controller on raw sockets; tests decide every byte and disconnect.

The replica answers by frames too, as real ones do, unless it is told not to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httptools
from uvicorn.server import ServerState

from policy.types import Replica, ReplicaLoad, ReplicaPhase
from policy.wire.frames import END, MAGIC, RESET
from serve.engine.frame_server import FrameServerConnection, FrameServerStream
from serve.engine.interface import WRITER, Receive, Scope, Send

SECRET = "secret-of-the-tests"


class Exchange:
    """A request and the means to answer it; ``gone``: its connection ended, ``answered``: all was written."""

    def __init__(self, connection: FakeConnection | FakeFrameConnection) -> None:
        self._connection = connection
        self.method = ""
        self.path = ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.answered = False
        self.gone = asyncio.Event()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def unsent(self) -> int:
        """Bytes that are not sent yet, without those in buffers of the kernel."""
        return self._connection.transport.get_write_buffer_size()

    async def write(self, data: bytes) -> None:
        """Send ``data``, as one segment if possible."""
        self._connection.transport.write(data)
        await asyncio.sleep(0)

    async def head(
        self, content_type: str, *, status: int = 200, length: int | None = None, **more: str
    ) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}"]
        lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
        await self.write("\r\n".join([*lines, "", ""]).encode())

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def reply(
        self, body: bytes, *, status: int = 200, content_type: str = "application/json", **more: str
    ) -> None:
        await self.head(content_type, status=status, length=len(body), **more)
        await self.write(body)

    async def refuse(self, reason: str, message: str = "") -> None:
        body = json.dumps({"error": {"message": message or reason, "type": "x", "param": None, "code": None}})
        await self.reply(body.encode(), status=503, x_tidegate_refusal=reason)

    def close(self) -> None:
        """End the connection in order (FIN)."""
        self._connection.transport.close()

    def reset(self) -> None:
        """Break the connection (RST)."""
        reset(self._connection.transport)


def reset(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


Answer = Callable[[Exchange], Awaitable[None]]


class FakeConnection(asyncio.Protocol):
    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._parts: list[bytes] = []
        self._start: bytes | None = b""
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self.exchange is not None:
            self.exchange.gone.set()

    def data_received(self, data: bytes) -> None:
        if self._start is not None and self._server.speaks_frames:
            data = self._start + data
            self._start = data if MAGIC.startswith(data) else None
            if data.startswith(MAGIC):
                self._server.connections.discard(self)
                FakeFrameConnection(self._server, self.transport).data_received(data)
            if self._start is not None or data.startswith(MAGIC):
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def on_message_begin(self) -> None:
        self.exchange = Exchange(self)

    def on_url(self, url: bytes) -> None:
        assert self.exchange is not None
        self.exchange.path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.exchange is not None
        self.exchange.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        assert self.exchange is not None
        self._parts.append(body)

    def on_message_complete(self) -> None:
        assert self.exchange is not None
        self.exchange.method = self._parser.get_method().decode()
        self.exchange.body, self._parts = b"".join(self._parts), []
        self._server.take(self.exchange)


class FrameExchange(Exchange):
    """A request on a stream of frames. The end of its connection is the end of all that are on it."""

    def __init__(self, connection: FakeFrameConnection, scope: Scope, body: bytes) -> None:
        super().__init__(connection)
        self.method, self.path, self.body = scope["method"], scope["path"], body
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self._stream: FrameServerStream = scope["extensions"][WRITER]
        self._stream.on_abort(self.gone.set)

    @property
    def unsent(self) -> int:
        return super().unsent + len(self._stream._kept)

    async def write(self, data: bytes) -> None:
        raise NotImplementedError("raw bytes are those of HTTP: a replica with frames=False has them")

    async def head(
        self, content_type: str, *, status: int = 200, length: int | None = None, **more: str
    ) -> None:
        headers = {"content_type": content_type, **more}
        if length is not None:
            headers["content_length"] = str(length)
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self._stream.start(status, named)

    async def chunk(self, data: bytes) -> None:
        self._stream.write(data)
        await asyncio.sleep(0)

    async def end(self, data: bytes = b"") -> None:
        self._stream.end(data)
        await asyncio.sleep(0)

    def record(self, kind: int, payload: bytes) -> None:
        """Send a record that need not be of a response."""
        assert isinstance(self._connection, FakeFrameConnection)
        self._connection.add(kind, self._stream, payload)
        if kind in (END, RESET):
            self._stream.abort()

    async def reply(
        self, body: bytes, *, status: int = 200, content_type: str = "application/json", **more: str
    ) -> None:
        await self.head(content_type, status=status, length=len(body), **more)
        await self.end(body)


class FakeFrameConnection(FrameServerConnection):
    """A gateway worker's connection."""

    exchange = None

    def __init__(self, server: FakeServer, transport: asyncio.Transport) -> None:
        super().__init__(self._serve, SECRET, transport, server.serving)
        self._server = server
        self.transport = transport
        server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        super().connection_lost(exc)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] == "http.request":
            self._server.take(FrameExchange(self, scope, message["body"]))
        while message["type"] != "http.disconnect":
            message = await receive()


class FakeServer:
    speaks_frames = False

    def __init__(self) -> None:
        self.connections: set[FakeConnection | FakeFrameConnection] = set()
        self.serving = ServerState()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        # As many clients wait as with a replica: 1,200 connect at once where another died.
        self._server = await loop.create_server(
            lambda: FakeConnection(self), "127.0.0.1", self.port, backlog=2048
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and break every connection, as a killed process does."""
        assert self._server is not None
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self.serving.tasks, return_exceptions=True)
        await self._server.wait_closed()

    def stop_accepting(self) -> None:
        """As a process that hangs: two connections wait, the kernel answers no more."""
        assert self._server is not None
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take(self, exchange: Exchange) -> None:
        task = asyncio.create_task(self._answer(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self.respond(exchange)
        finally:
            exchange.answered = True

    async def respond(self, exchange: Exchange) -> None:
        raise NotImplementedError


class FakeReplica(FakeServer):
    """Speaks the replica port's contract; ``answer`` decides what a request gets."""

    def __init__(self, name: str, model: str = "alpha", *, bound: int = 8, frames: bool = True) -> None:
        super().__init__()
        self.speaks_frames = frames
        self.id = name
        self.model = model
        self.bound = bound
        self.in_flight = 0
        self.state = "ready"
        self.adapters: list[str] = []
        self.refused: list[str] = []
        self.hits: list[Exchange] = []
        self.answer: Answer = answer_json
        self.metrics = b""
        self._changed = asyncio.Event()

    def report(self, **fields: Any) -> None:
        """Change fields of the load stream: ``state``, ``in_flight``, ``adapters`` and others."""
        for name, value in fields.items():
            setattr(self, name, value)
        self._changed.set()

    def entry(self, state: str = "ready") -> dict[str, Any]:
        """This replica in a fleet snapshot."""
        return {
            "id": self.id,
            "model": self.model,
            "shape": "small",
            "generation": 1,
            "state": state,
            "load": self.load(),
            "url": self.url,
            "adapters": self.adapters,
        }

    def _report(self) -> dict[str, Any]:
        return {
            "state": self.state, "load": self.load(), "adapters": self.adapters, "refused": self.refused
        }  # fmt: skip

    def load(self) -> dict[str, Any]:
        return {"at": 1.0, "in_flight": self.in_flight, "bound": self.bound}

    async def respond(self, exchange: Exchange) -> None:
        if exchange.headers.get("x-tidegate-secret") != SECRET:
            await exchange.reply(b"{}", status=401)
        elif exchange.path == "/internal/load":
            await _follow(exchange, self._changed, self._report)
        elif exchange.path == "/metrics":
            await exchange.reply(self.metrics, content_type="text/plain", status=200 if self.metrics else 404)
        else:
            self.hits.append(exchange)
            self.in_flight += 1
            self._changed.set()
            try:
                await self.answer(exchange)
            finally:
                self.in_flight -= 1
                self._changed.set()


def ready_replica(name: str = "r", model: str = "m", **over: Any) -> Replica:
    """A replica that is ready, as the fleet describes it."""
    fields = {"shape": "s", "generation": 1, "url": "http://127.0.0.1:9", "load": ReplicaLoad(at=0.0), **over}
    return Replica(id=name, model=model, **{"state": ReplicaPhase.READY, **fields})


def alias(
    name: str,
    *digests: str,
    model: str = "alpha",
    split: Sequence[tuple[int, float]] | None = None,
    tenants: Sequence[str] = (),
) -> dict[str, Any]:
    """A catalog's alias with these versions from 1 on; without a ``split`` the last gets all requests."""
    versions = [
        {"number": number, "digest": digest, "rank": 8, "size": 1, "source": "/a", "at": 1.0}
        for number, digest in enumerate(digests, 1)
    ]
    return {
        "model": model,
        "name": name,
        "revision": len(digests),
        "versions": versions,
        "split": split or [(len(digests), 1.0)],
        "tenants": tenants,
        "at": 7.0,
    }


async def plain_server(exchange: Exchange, serve: Answer) -> None:
    """As a server that lists the model alpha and has no metrics; other requests go to ``serve``."""
    if exchange.path == "/v1/models":
        await exchange.reply(b'{"data": [{"id": "alpha"}]}')
    elif exchange.path == "/metrics":
        await exchange.reply(b"{}", status=404)
    else:
        await serve(exchange)


class FakeController(FakeServer):
    """Streams the fleet and catalog of a test and keeps reports; ``answer`` gets all other requests."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 100.0
        self.version = 1
        self.models: list[dict[str, Any]] = []
        self.replicas: list[dict[str, Any]] = []
        self.aliases: list[dict[str, Any]] = []
        self.asked: list[Exchange] = []
        self.reports: list[dict[str, Any]] = []
        self.answer: Answer = answer_json
        self.samples: dict[str, Any] = {}
        self.scrapes = 0
        self._changed = asyncio.Event()
        self._published = asyncio.Event()

    def set(self, *replicas: FakeReplica, state: str = "ready") -> None:
        """A new version of the fleet with these replicas."""
        self.version += 1
        self.replicas = [replica.entry(state) for replica in replicas]
        self._changed.set()

    def publish(self, *aliases: dict[str, Any]) -> None:
        """A new version of the catalog with these aliases."""
        self.version += 1
        self.aliases = list(aliases)
        self._published.set()

    async def respond(self, exchange: Exchange) -> None:
        assert exchange.headers["x-tidegate-secret"] == SECRET
        if exchange.path == "/fleet/stream":
            await _follow(exchange, self._changed, lambda: self._document("models", "replicas", at=1.0))
        elif exchange.path == "/adapters/stream":
            await _follow(exchange, self._published, lambda: self._document("aliases"))
        elif exchange.path == "/signals":
            self.reports.append(exchange.json)
            await exchange.reply(b"{}")
        elif exchange.path == "/metrics":
            self.scrapes += 1
            await exchange.reply(json.dumps(self.samples).encode())
        else:
            self.asked.append(exchange)
            await self.answer(exchange)

    def _document(self, *fields: str, **more: Any) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in fields}
        return {"epoch": self.epoch, "version": self.version, **named, **more}


async def _follow(exchange: Exchange, changed: asyncio.Event, line: Callable[[], dict[str, Any]]) -> None:
    """Stream a new line at each change, and twice a second."""
    await exchange.head("application/x-ndjson")
    while not exchange.gone.is_set():
        changed.clear()
        await exchange.chunk(_line(line()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), 0.5)


def _line(fields: dict[str, Any]) -> bytes:
    """A line of NDJSON, in which a lone surrogate is an undecodable byte."""
    return json.dumps(fields, ensure_ascii=False).encode(errors="surrogateescape") + b"\n"


ANSWER = json.dumps(
    {
        "id": "cmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "alpha",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Paris é"}}
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()


def event(text: str | None = None, finish: str | None = None, index: int = 0) -> bytes:
    """One chat chunk, written as vLLM writes it."""
    chunk = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "alpha",
        "choices": [{"index": index, "delta": {"content": text} if text else {}, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
STREAM = event("Par") + event('is "finish_reason":"stop" [DONE]\n\ndata: x') + event(finish="stop") + DONE


async def answer_json(exchange: Exchange) -> None:
    """A complete answer, streamed if that was asked for."""
    if exchange.json.get("stream"):
        await stream(STREAM)(exchange)
    else:
        await exchange.reply(ANSWER)


def stream(data: bytes, *, piece: int | None = None) -> Answer:
    """Send ``data`` as an event stream, in chunks of ``piece`` bytes."""

    async def answer(exchange: Exchange) -> None:
        await exchange.head("text/event-stream; charset=utf-8")
        for i in range(0, len(data), piece or len(data)):
            await exchange.chunk(data[i : i + (piece or len(data))])
        await exchange.end()

    return answer


def hold(until: asyncio.Event, answer: Answer = answer_json) -> Answer:
    """Answer once ``until`` is set."""

    async def held(exchange: Exchange) -> None:
        await until.wait()
        await answer(exchange)

    return held


async def forever(exchange: Exchange) -> None:
    """Stream one event, then nothing more until the client leaves."""
    await exchange.head("text/event-stream")
    await exchange.chunk(event("x"))
    await exchange.gone.wait()
