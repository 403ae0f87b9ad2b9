"""The fastest upstream we can write: replicas on raw uvloop protocols, to measure a gateway against.

``python -m loadtests.bench.upstream PORT...`` serves one replica on each port and prints ``ready`` and a
control port. Every answer is the same bytes, so that a gateway's can be compared with them.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import msgspec
import uvloop

from loadtests.bench.replica import (
    CHARS_PER_TOKEN,
    MockReplica,
    MockReplicaCounts,
    MockReplicaSettings,
    read_mark,
)
from loadtests.bench.upstream_answers import ANSWER, CHUNK, END, HEAD, LAST, models, rendered, usage


class UpstreamCommand(msgspec.Struct, kw_only=True):
    """An order to the control port: configure all replicas, or make one slow, dead or alive."""

    setting: MockReplicaSettings | None = None
    replica: int = 0
    slow: float | None = None
    kill: bool = False
    revive: bool = False


class MockServerConnection(asyncio.Protocol):
    """One connection: a request is read whole, answered, and the next one is read."""

    def __init__(self, server: MockReplicaServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._buffer = bytearray()
        self._wanted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._server.open.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.open.discard(self._transport)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= self._wanted and (end := buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(buffer[:end])
            lowered = head.lower()
            if b"\r\ntransfer-encoding: chunked" in lowered:
                if not buffer.endswith(b"0\r\n\r\n"):
                    return
                body = unchunked(bytes(buffer[end + 4 :]))
                buffer.clear()
                self._answer(head, body)
                return
            at = lowered.find(b"\r\ncontent-length:")
            length = int(lowered[at + 17 :].partition(b"\r\n")[0]) if at >= 0 else 0
            self._wanted = end + 4 + length
            if len(buffer) < self._wanted:
                if b"\r\nexpect: 100-continue" in lowered:
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            body = bytes(buffer[end + 4 : self._wanted])
            del buffer[: self._wanted]
            self._wanted = 0
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith((b"GET ", b"POST ")):  # routers probe a worker for HTTP/2
            self._transport.abort()
            return
        path = head.split(b" ", 2)[1]
        if head.startswith(b"GET"):
            self._transport.write(models(self._server.replica.setting.adapters, path))
            return
        if path.endswith(b"/render"):
            self._transport.write(rendered(body))
            return
        tail = body if len(body) < 1024 else body[:512] + body[-512:]
        tail = tail.replace(b": ", b":")
        stream = b'"stream":true' in tail
        counts = b'"include_usage":true' in tail
        loop = asyncio.get_running_loop()
        now = loop.time()
        replica = self._server.replica
        first, tokens = now, len(body) // CHARS_PER_TOKEN
        mark = read_mark(body)
        if mark is not None:
            tokens = mark.tokens
            model = tail.partition(b'"model":"')[2].partition(b'"')[0].decode()
            first = replica.arrive(mark, "" if model == "alpha" else model, now)
        if first > now and replica.setting.token_s:
            self._timer = loop.call_at(first, self._begin, stream, counts, tokens)
        else:
            self._begin(stream, counts, tokens)

    def _begin(self, stream: bool, counts: bool, tokens: int) -> None:
        if stream:
            self._transport.write(HEAD)
            self._next(asyncio.get_running_loop().time(), 0, tokens if counts else 0)
        else:
            self._transport.write(ANSWER)

    def _next(self, began: float, sent: int, tokens: int) -> None:
        """The chunk after ``sent`` others; ``tokens`` of the prompt are reported at the end, unless 0."""
        setting = self._server.replica.setting
        if sent >= setting.chunks:
            self._transport.write(LAST + usage(tokens, sent) + END if tokens else LAST + END)
            return
        self._transport.write(CHUNK)
        at = began + (sent + 1) * setting.gap_s
        self._timer = asyncio.get_running_loop().call_at(at, self._next, began, sent + 1, tokens)


def unchunked(data: bytes) -> bytes:
    """A whole chunked body (RFC 9112, 7.1) without its encoding."""
    parts: list[bytes] = []
    at = 0
    while (size := int(data[at : (end := data.index(b"\r\n", at))], 16)) > 0:
        parts.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(parts)


class MockReplicaServer:
    """One replica on one port, which can be killed and revived."""

    def __init__(self, port: int, setting: MockReplicaSettings) -> None:
        self._port = port
        self.replica = MockReplica(setting)
        self.open: set[asyncio.Transport] = set()
        self._listening: asyncio.Server | None = None

    async def revive(self) -> None:
        """Listen, if it does not."""
        if self._listening is None:
            self._listening = await asyncio.get_running_loop().create_server(
                lambda: MockServerConnection(self), "127.0.0.1", self._port, backlog=4096
            )

    def kill(self) -> None:
        """Close as a killed process does: open connections are reset."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        for transport in list(self.open):
            transport.abort()


async def _serve(ports: list[int]) -> None:
    servers = [MockReplicaServer(port, MockReplicaSettings()) for port in ports]
    for server in servers:
        await server.revive()

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            order = msgspec.json.decode(line, type=UpstreamCommand)
            chosen = servers[order.replica]
            if order.setting is not None:
                for server in servers:
                    server.replica.configure(order.setting)
            if order.slow is not None:
                chosen.replica.slow_down(order.slow)
            if order.kill:
                chosen.kill()
            if order.revive:
                await chosen.revive()
            counts: list[MockReplicaCounts] = [server.replica.counts() for server in servers]
            writer.write(msgspec.json.encode(counts) + b"\n")
        writer.close()

    listening = await asyncio.start_server(control, "127.0.0.1", 0, limit=1 << 24)
    sys.stdout.write(f"ready {listening.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve([int(port) for port in sys.argv[1:]]))
