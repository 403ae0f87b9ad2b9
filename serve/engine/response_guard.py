"""Answers of a guard: an engine's, held back until they begin, and its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from urllib.parse import parse_qs

import msgspec

from policy.errors import EngineFailed, PreconditionFailed, Refusal
from policy.wire.headers import ENGINE_TIME_HEADER, REFUSAL_HEADER
from serve.engine.interface import Engine, Message, ResponseWriter, Send

# Seconds of a trace at most: each has megabytes.
MAX_TRACE_S = 60.0
PART = 1 << 20
DIED = "the engine died under this request"
ENGINE_TIME = ENGINE_TIME_HEADER.encode()


class ResponseGuard:
    """Holds back the head of an answer until its first byte; if there is none, answers that it never began.

    When an engine dies its app answers 500, or 200 with an error. From these the gateway could not tell a
    request that never began, which it may retry, from an invalid one. An app answers by calling it, as ASGI's
    ``send``, or where the request came with a ``writer``, by the methods of ``ResponseWriter``.

    ``timed``: it says how long the engine took, as :data:`ENGINE_TIME_HEADER` defines.
    """

    def __init__(
        self,
        engine: Engine,
        send: Send,
        answered: Callable[[ResponseGuard], None],
        *,
        writer: ResponseWriter | None = None,
        timed: bool = False,
    ) -> None:
        self._engine = engine
        self._send = send
        self._answered = answered
        self._writer = writer
        self._timed = timed
        self._head: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._lost = self._stream = False
        self._arrived_at = self._first_at = self._last_at = monotonic()
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if self._lost:
            return
        if message["type"] == "http.response.start":
            self.start(message["status"], list(message["headers"]))
            return
        if self._head is not None:
            if (opened := self._opened()) is None:
                await answer(self._send, 503, Refusal.REPLICA_LOST, DIED)
                return
            await start(self._send, *opened)
        if self._stream:
            body = message.get("body", b"")
            if message.get("more_body"):
                self._last_at = monotonic()
            else:
                message = {**message, "body": body + self._span(body)}
        await self._send(message)

    # ResponseWriter

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._head = (status, headers)

    def write(self, data: bytes) -> None:
        writer = self._writer
        assert writer is not None
        if self._lost or (self._head is not None and not self._begins(writer)):
            return
        if self._stream:
            self._last_at = monotonic()
        writer.write(data)

    def end(self, data: bytes = b"") -> None:
        writer = self._writer
        assert writer is not None
        if self._lost or (self._head is not None and not self._begins(writer)):
            return
        writer.end(data + self._span(data) if self._stream else data)

    def on_abort(self, callback: Callable[[], None]) -> None:
        assert self._writer is not None
        self._writer.on_abort(callback)

    def _begins(self, writer: ResponseWriter) -> bool:
        """Whether the answer begins now; otherwise the engine is dead."""
        if (opened := self._opened()) is None:
            headers, body = refusal(Refusal.REPLICA_LOST, DIED)
            writer.start(503, headers)
            writer.end(body)
            return False
        writer.start(*opened)
        return True

    def _opened(self) -> tuple[int, list[tuple[bytes, bytes]]] | None:
        """The head of an answer whose first byte has come; ``None`` if the engine is dead."""
        assert self._head is not None
        (status, headers), self._head = self._head, None
        self.begun = True
        if self._engine.dead:
            self._lost = True
            return None
        self._answered(self)
        if self._timed:
            self._stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            self._first_at = self._last_at = monotonic()
            headers.append((ENGINE_TIME, b"%.6f" % (self._first_at - self._arrived_at)))
        return status, headers

    def _span(self, last: bytes) -> bytes:
        """The comment with the time from a stream's first byte to its ``last`` ones."""
        if last:
            self._last_at = monotonic()
        return b": %b %.6f\n\n" % (ENGINE_TIME, self._last_at - self._first_at)


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


def refusal(reason: Refusal, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an answer of Tidegate's own."""
    error = {"message": message, "type": "tidegate_error", "param": None, "code": str(reason)}
    body = msgspec.json.encode({"error": error})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (REFUSAL_HEADER.encode(), str(reason).encode()),
    ]
    return headers, body


async def answer(send: Send, status: int, reason: Refusal, message: str) -> None:
    headers, body = refusal(reason, message)
    await start(send, status, headers)
    await send({"type": "http.response.body", "body": body})
