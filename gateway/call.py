"""One client's request: its headers and body, its answer, and whether the client still listens."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets

from starlette.types import Message, Receive, Scope, Send

from gateway.errors import Refused
from gateway.surface import Api, Route
from policy.errors import Refusal

_WANTED = frozenset(
    {
        b"accept",
        b"anthropic-version",
        b"content-length",
        b"x-request-id",
        b"x-request-timeout-s",
    }
)
# What is read and thrown away of a body that is too large: closing on a client that still sends
# would reset the connection and lose the answer.
MAX_DISCARDED = 64 * 1024 * 1024
_VALID_ID = re.compile(rb"[A-Za-z0-9_-]{1,128}")
# Unique over processes and restarts by the random part, within one by the count.
_PREFIX = secrets.token_hex(8).encode()
_COUNT = itertools.count(1)


class Call:
    """A request between the client's connection and a replica's.

    ``started`` once a byte of the answer was sent, ``answered`` once its last one was handed over,
    ``left`` once the client is gone, ``replica`` the one that has it or had it last.
    ``first_byte_at`` is set for streams alone; ``events`` and ``last_event_at`` count their events up
    to the one that finishes the answer.
    """

    __slots__ = (
        "_receive",
        "_task",
        "_watcher",
        "answered",
        "events",
        "first_byte_at",
        "headers",
        "last_event_at",
        "left",
        "outcome",
        "queued_s",
        "replica",
        "request_id",
        "route",
        "send",
        "started",
        "upstream_id",
    )

    def __init__(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        self.route = route
        self.send = send
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._task: asyncio.Task[object] | None = None
        self.headers = {name: value for name, value in scope["headers"] if name in _WANTED}
        self.request_id, self.upstream_id = request_ids(self.headers.get(b"x-request-id"))
        self.left = False
        self.started = False
        self.answered = False
        self.outcome = ""
        self.queued_s = 0.0
        self.replica = b""
        self.first_byte_at: float | None = None
        self.events = 0
        self.last_event_at = 0.0

    async def read(self, limit: int) -> bytes:
        """The whole body; raises :class:`gateway.errors.Refused` above ``limit`` bytes."""
        length = self.headers.get(b"content-length", b"")
        message = await self._receive()
        body: bytes = message.get("body", b"")
        size = max(len(body), int(length) if length.isdigit() else 0)
        if message.get("more_body"):
            parts = [body]
            read = len(body)
            while message.get("more_body"):
                message = await self._receive()
                part = message.get("body", b"")
                read += len(part)
                size = max(size, read)
                if size <= limit:
                    parts.append(part)
                elif read > limit + MAX_DISCARDED:
                    break
            body = b"".join(parts)
        if message["type"] == "http.disconnect":
            self.left = True
            raise asyncio.CancelledError
        if size > limit:
            raise Refused(Refusal.TOO_LARGE, f"The body is larger than {limit} bytes.")
        return body

    def timeout_s(self, default: float) -> float:
        """How long the client would wait for a replica: its header if that is shorter."""
        raw = self.headers.get(b"x-request-timeout-s")
        if raw is None:
            return default
        try:
            wanted = float(raw)
        except ValueError:
            wanted = -1.0
        if not 0 < wanted < float("inf"):
            raise Refused(
                Refusal.BAD_REQUEST,
                "x-request-timeout-s must be a positive number of seconds.",
                param="x-request-timeout-s",
            )
        return min(default, wanted)

    def watch(self) -> None:
        """From now on cancel the task that serves this call when the client leaves."""
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        # A server answers with a disconnect as well once the response is complete, so this ends.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.answered:
            self.left = True
            assert self._task is not None
            self._task.cancel()

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> Message:
        """The start of the answer, with the id of the request."""
        headers.append((b"x-request-id", self.request_id))
        if self.route.api is Api.MESSAGES:  # the name that Anthropic's clients read
            headers.append((b"request-id", self.request_id))
        return {"type": "http.response.start", "status": status, "headers": headers}

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole answer."""
        self.started = self.answered = True
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send(self.head(status, headers))
        await self.send({"type": "http.response.body", "body": body})

    async def refuse(self, refused: Refused) -> None:
        """Answer with an error in the envelope of the call's API."""
        headers = refused.headers()
        if self.replica:
            headers.append((b"x-tidegate-replica", self.replica))
        body = refused.body(anthropic=self.route.api is Api.MESSAGES)
        await self.answer(refused.status, headers, body)


def request_ids(given: bytes | None) -> tuple[bytes, bytes]:
    """The id that the client sees and the one that a replica sees.

    The replica's is always unique: engines key their requests by it, and two clients may send the same.
    """
    unique = b"%s-%x" % (_PREFIX, next(_COUNT))
    if given is not None and _VALID_ID.fullmatch(given):
        return given, given + b"-" + unique
    return unique, unique
