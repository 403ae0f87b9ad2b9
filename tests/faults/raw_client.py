"""A client on a raw socket with controlled reads and disconnects, which checks its response."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import httptools

READ_BYTES = 64 * 1024
PATIENCE_S = 60.0


@dataclass(eq=False)
class Reply:
    """The response to one request; instants are seconds of ``time.monotonic``."""

    path: str
    asked_at: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)
    head_at: float = 0.0
    ended_at: float = 0.0
    whole: bool = False
    cut: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.arrivals)

    @property
    def took_s(self) -> float:
        return self.ended_at - self.asked_at

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def data(self) -> list[str]:
        text = self.body.decode()  # a stream that is no UTF-8 must not reach a client
        events = text.replace("\r\n", "\n").split("\n\n")
        lines = [[line[5:].strip() for line in e.split("\n") if line.startswith("data:")] for e in events]
        return ["\n".join(found) for found in lines if found]

    @property
    def json(self) -> Any:
        return strict(self.body.decode())

    @property
    def text(self) -> str:
        if not self.streamed:
            return str(self.json["choices"][0]["message"]["content"])
        chunks = [strict(data) for data in self.data if data != "[DONE]"]
        return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if "choices" in c)

    @property
    def error(self) -> dict[str, Any] | None:
        if self.status != 200:
            return dict(self.json["error"])
        if not self.streamed:
            return None
        found = [decoded for data in self.data if data != "[DONE]" and (decoded := strict(data)).get("error")]
        return dict(found[0]["error"]) if found else None

    def check(self) -> None:
        """Fail unless this is a whole success, or an error as its API writes it and nothing more."""
        assert "x-request-id" in self.headers
        if self.status in (429, 503):
            assert 1 <= int(self.headers["retry-after"]) <= 120
        if self.status != 200:
            assert self.whole
            assert self.headers["content-type"] == "application/json"
            check_error(self.json, anthropic=self.path == "/v1/messages")
        elif not self.streamed:
            assert self.cut or "error" not in self.json
        else:
            self._check_stream()

    def _check_stream(self) -> None:
        assert self.whole, "a stream ends in order, also when it failed"
        decoded = [strict(data) for data in self.data if data != "[DONE]"]
        errors = [one for one in decoded if one.get("error")]
        for one in errors:
            check_error(one, anthropic=self.path == "/v1/messages")
        if errors:
            assert len(errors) == 1
            assert errors[0] is decoded[-1]
            assert "[DONE]" not in self.data
        elif self.path in ("/v1/chat/completions", "/v1/completions"):
            assert self.data[-1] == "[DONE]"
            assert any(choice["finish_reason"] for one in decoded for choice in one["choices"])


class RawClient:
    """One request on a connection of its own."""

    def __init__(self, sock: socket.socket, path: str) -> None:
        self._sock = sock
        self._parser = httptools.HttpResponseParser(self)
        self.reply = Reply(path, time.monotonic())

    @classmethod
    async def post(
        cls,
        url: str,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str] | None = None,
        *,
        window_bytes: int | None = None,
    ) -> RawClient:
        sock = socket.socket()
        sock.setblocking(False)
        if window_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
        host, port = url.removeprefix("http://").split(":")
        client = cls(sock, path)
        raw = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [f"content-length: {len(raw)}", "", ""]
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(sock, (host, int(port)))
            await loop.sock_sendall(sock, "\r\n".join(lines).encode() + raw)
        except BaseException:
            client.leave()
            raise
        return client

    async def read(self, size: int = READ_BYTES) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                data = await asyncio.get_running_loop().sock_recv(self._sock, size)
        except ConnectionError:
            data = b""
        if not data:
            self.reply.cut = not self.reply.whole
        else:
            self._parser.feed_data(data)
        if self.reply.cut or self.reply.whole:
            self.reply.ended_at = time.monotonic()
            self._sock.close()
            return False
        return True

    async def events(self, count: int) -> None:
        while self.reply.body.count(b"\n\n") < count:
            assert await self.read(), self.reply

    async def end(self) -> Reply:
        while await self.read():
            pass
        self.reply.check()
        return self.reply

    def leave(self, *, reset: bool = False) -> float:
        if self._sock.fileno() >= 0:  # a read that is cancelled must not be left watching a closed descriptor
            asyncio.get_running_loop().remove_reader(self._sock)
            asyncio.get_running_loop().remove_writer(self._sock)
        if reset:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()
        return time.monotonic()

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reply.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.reply.status = self._parser.get_status_code()
        self.reply.head_at = time.monotonic()

    def on_body(self, body: bytes) -> None:
        self.reply.arrivals.append((time.monotonic(), body))

    def on_message_complete(self) -> None:
        self.reply.whole = True


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def check_error(decoded: dict[str, Any], *, anthropic: bool) -> None:
    error = decoded["error"]
    if anthropic:
        assert decoded["type"] == "error"
        assert {"type", "message"} <= set(error)
    else:
        assert {"message", "type", "param", "code"} == set(error)
        assert error["param"] is None or isinstance(error["param"], str)
        assert error["code"] is None or isinstance(error["code"], str)
    assert isinstance(error["type"], str) and error["type"].endswith("error")
    assert isinstance(error["message"], str) and 0 < len(error["message"]) <= 2048
    assert "Traceback" not in error["message"]
