"""The fastest upstream we can write: a replica on raw uvloop protocols, to measure a gateway against.

Run: ``python loadtests/bench_upstream.py PORT [CHUNKS] [GAP_MS]``. It answers ``/v1/models``, the load
stream, and any POST: a fixed JSON answer, or a stream of CHUNKS events GAP_MS apart if the body asks.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, cast

import uvloop

BODY = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "model": "alpha",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
    }
).encode()
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
) + BODY
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _event(text: str, finish: str | None) -> bytes:
    chunk: dict[str, Any] = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "alpha",
        "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}],
    }
    data = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNK = _event(" token", None)
LAST = _event("", "stop") + b"e\r\ndata: [DONE]\n\n\r\n" + b"0\r\n\r\n"
LOAD = json.dumps({"state": "ready", "load": {"at": 0.0, "in_flight": 0, "bound": 0}}).encode() + b"\n"
MODELS = b'{"object":"list","data":[]}'


class Upstream(asyncio.Protocol):
    """One connection; requests are told apart by their length alone."""

    chunks = 64
    gap_s = 0.01

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            at = head.find(b"content-length: ")
            length = int(head[at + 16 : (head + b"\r").index(b"\r", at)]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET /internal/load"):
            self._transport.write(STREAM_HEAD.replace(b"text/event-stream", b"application/x-ndjson"))
            self._tick()
        elif head.startswith(b"GET"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(MODELS), MODELS)
            )
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._transport.write(STREAM_HEAD)
            self._next(asyncio.get_running_loop().time(), 0)
        else:
            self._transport.write(ANSWER)

    def _next(self, began: float, sent: int) -> None:
        if sent >= self.chunks:
            self._transport.write(LAST)
            return
        self._transport.write(CHUNK)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(began + (sent + 1) * self.gap_s, self._next, began, sent + 1)

    def _tick(self) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(LOAD), LOAD))
        self._timer = asyncio.get_running_loop().call_later(0.5, self._tick)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port)
    print("ready", flush=True)  # noqa: T201 - the runner waits for this line
    await server.serve_forever()


if __name__ == "__main__":
    Upstream.chunks = int(sys.argv[2]) if len(sys.argv) > 2 else Upstream.chunks
    Upstream.gap_s = float(sys.argv[3]) / 1000 if len(sys.argv) > 3 else Upstream.gap_s
    uvloop.run(_serve(int(sys.argv[1])))
