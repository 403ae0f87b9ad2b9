"""Answers of a guard: an engine's, held back until they begin, and its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from urllib.parse import parse_qs

import msgspec

from policy.errors import EngineFailed, PreconditionFailed, Refusal
from policy.wire.headers import ENGINE_TIME_HEADER, REFUSAL_HEADER
from serve.engine.interface import Engine, Message, Send

# Seconds of a trace at most: each has megabytes.
MAX_TRACE_S = 60.0
PART = 1 << 20
ENGINE_TIME = ENGINE_TIME_HEADER.encode()


class Answer:
    """Holds back the head of an answer until its first byte; if there is none, answers that it never began.

    When an engine dies its app answers 500, or 200 with an error. From these the gateway could not tell a
    request that never began, which it may retry, from an invalid one.
    """

    def __init__(self, engine: Engine, send: Send, answered: Callable[[Answer], None]) -> None:
        self._engine = engine
        self._send = send
        self._answered = answered
        self._head: Message | None = None
        self._lost = False
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if self._lost:
            return
        if message["type"] == "http.response.start":
            self._head = message
            return
        if self._head is not None:
            if self._engine.dead:
                self._lost = self.begun = True
                await answer(self._send, 503, Refusal.REPLICA_LOST, "the engine died under this request")
                return
            self._answered(self)
            self.begun = True
            await self._send_head(self._head)
            self._head = None
        await self._send_body(message)

    async def _send_head(self, head: Message) -> None:
        await self._send(head)

    async def _send_body(self, message: Message) -> None:
        await self._send(message)


class TimedAnswer(Answer):
    """An answer that says how long the engine took for it, as :data:`ENGINE_TIME_HEADER` defines."""

    def __init__(self, engine: Engine, send: Send, answered: Callable[[Answer], None]) -> None:
        super().__init__(engine, send, answered)
        self._arrived_at = self._first_at = self._last_at = monotonic()
        self._stream = False

    async def _send_head(self, head: Message) -> None:
        headers = list(head["headers"])
        self._stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
        )
        self._first_at = self._last_at = monotonic()
        headers.append((ENGINE_TIME, b"%.6f" % (self._first_at - self._arrived_at)))
        await self._send({**head, "headers": headers})

    async def _send_body(self, message: Message) -> None:
        if self._stream:
            body = message.get("body", b"")
            if body:
                self._last_at = monotonic()
            if not message.get("more_body"):
                comment = b": %b %.6f\n\n" % (ENGINE_TIME, self._last_at - self._first_at)
                message = {**message, "body": body + comment}
        await self._send(message)


async def profile(engine: Engine, query: bytes, send: Send) -> None:
    """Answer with a trace of the seconds in ``query``, as a file."""
    try:
        seconds = float(parse_qs(query.decode("ascii", "replace")).get("seconds", ["2"])[0])
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= MAX_TRACE_S:
        await answer(send, 400, Refusal.BAD_REQUEST, f"seconds must be a number up to {MAX_TRACE_S:g}")
        return
    try:
        path = await engine.profile(seconds)
    except (PreconditionFailed, EngineFailed) as error:
        await answer(send, 409, Refusal.BAD_REQUEST, str(error))
        return
    try:
        await start(send, 200, [(b"content-type", b"application/gzip")])
        with path.open("rb") as file:
            while part := await asyncio.to_thread(file.read, PART):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        path.unlink()


async def start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def answer(send: Send, status: int, refusal: Refusal, message: str) -> None:
    error = {"message": message, "type": "tidegate_error", "param": None, "code": str(refusal)}
    body = msgspec.json.encode({"error": error})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (REFUSAL_HEADER.encode(), str(refusal).encode()),
    ]
    await start(send, status, headers)
    await send({"type": "http.response.body", "body": body})
