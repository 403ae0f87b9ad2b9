"""One attempt of one call on one replica: from the response's head to the client's last byte.

The first body byte is the commit point. Before it nothing was said to the client and the attempt
may be repeated elsewhere; after it never.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from time import perf_counter

from gateway.call import Call
from gateway.errors import Refused, from_upstream, rejection_status
from gateway.metrics import ModelMeter
from gateway.outlet import Outlet
from gateway.sse import Tail
from gateway.upstream import Connection
from policy.errors import Refusal

MAX_ERROR_BYTES = 64 * 1024
REFUSAL_HEADER = b"x-tidegate-refusal"


class Verdict(StrEnum):
    """How an attempt ended."""

    SERVED = "served"
    BROKEN = "broken"
    REJECTED = "rejected"
    REFUSED = "refused"
    FAILED = "failed"
    LOST = "lost"
    STALE = "stale"
    SILENT = "silent"
    UNREACHABLE = "unreachable"


class Relay:
    """The sink of the upstream connection; ``done`` yields the verdict.

    ``refused`` holds what to tell the client for ``REJECTED`` and ``FAILED``, ``reason`` why the
    replica did not take the request for ``REFUSED``.
    """

    __slots__ = (
        "_call",
        "_committed",
        "_connection",
        "_error",
        "_headers",
        "_last_at",
        "_meter",
        "_outlet",
        "_status",
        "_stream",
        "_tail",
        "done",
        "on_first",
        "reason",
        "refused",
        "streams",
    )

    def __init__(self, call: Call, connection: Connection, tail: Tail, meter: ModelMeter) -> None:
        self._call = call
        self._connection = connection
        self._tail = tail
        self._meter = meter
        self._outlet = Outlet(call.send, partial(connection.pause, self), partial(connection.resume, self))
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._stream = False
        self._error: bytearray | None = None
        self._committed = False
        self._last_at = 0.0
        self.reason = Refusal.BUSY
        self.refused: Refused | None = None
        self.on_first: Callable[[], None] | None = None
        self.streams = True
        self.done: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()

    async def run(self, head: bytes, body: bytes) -> Verdict:
        """Send the request and relay its answer; cancelling closes the connection at once."""
        try:
            self._connection.send(self, head, body)
            verdict = await self.done
            await self._outlet.drained()
        except asyncio.CancelledError:
            self._connection.abort(self)
            self._outlet.drop()
            if self._committed and self._stream and not (self._call.left or self._call.answered):
                # The drain has run out of time: a cut must not look like an end.
                refused = Refused(Refusal.SHUTTING_DOWN, "The gateway is shutting down.")
                self._call.answered = True
                await self._call.send({"type": "http.response.body", "body": self._tail.error_event(refused)})
            raise
        finally:
            # It holds this relay: as a cycle, request and body would stay until a collection.
            del self._outlet
        return verdict

    @property
    def committed(self) -> bool:
        """Whether the client has heard of an answer, so that there can be no other."""
        return self._committed

    def expire(self, waited_s: float) -> None:
        """The replica was silent for ``waited_s`` seconds: give it up."""
        if not self._committed and not self.done.done():
            self._connection.abort(self)
            self.refused = Refused(Refusal.UPSTREAM_FAILED, f"The replica was silent for {waited_s:g} s.")
            self._settle(Verdict.SILENT)

    # the connection's sink

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        self._headers = headers
        if status == 200:
            kind = headers.get(b"content-type", b"")
            self._stream = kind.startswith(b"text/event-stream")
            if (self._stream or kind.startswith(b"application/json")) and (
                b"content-encoding" not in headers
            ):
                return
        self._error = bytearray()

    def on_data(self, data: bytes, *, complete: bool) -> None:
        try:
            if self._error is not None:
                self._collect(data, complete)
            elif self._stream:
                self._relay_events(data, complete)
            else:
                self._relay_bytes(data, complete)
        except Exception as error:  # noqa: BLE001 - whatever breaks here, the call must end
            self._fail(error)

    def on_lost(self, *, begun: bool) -> None:
        try:
            self._lose(begun)
        except Exception as error:  # noqa: BLE001 - whatever breaks here, the call must end
            self._fail(error)

    # what each kind of answer needs

    def _lose(self, begun: bool) -> None:
        if self._committed:
            if self._stream:
                self._end_stream(clean=False)
            self._settle(Verdict.SERVED if self._ended_well() else Verdict.BROKEN)
        elif self._connection.reused and not begun:
            self._settle(Verdict.STALE)
        else:
            self._settle(Verdict.LOST)

    def _relay_bytes(self, data: bytes, complete: bool) -> None:
        if not self._committed:
            if not data and not complete:
                return
            length = self._headers.get(b"content-length")
            self._commit([] if length is None else [(b"content-length", length)])
        if complete:
            self._call.answered = True
        self._outlet.put({"type": "http.response.body", "body": data, "more_body": not complete})
        if complete:
            self._settle(Verdict.SERVED)

    def _relay_events(self, data: bytes, complete: bool) -> None:
        finished = self._tail.finished
        out = self._tail.feed(data)
        if out:
            now = perf_counter()
            if not self._committed:
                if self._tail.error and (status := rejection_status(self._tail.error)) is not None:
                    # vLLM opens the stream before it has checked all; nothing was said to the client yet.
                    if not complete:
                        self._connection.abort(self)
                    self.refused = from_upstream(status, self._tail.error, None, self._call.route)
                    self._settle(Verdict.REJECTED)
                    return
                self._commit([(b"cache-control", b"no-cache")])
            if self._last_at:
                self._meter.itl.add(now - self._last_at)
                self._last_at = now
            elif not out.startswith(b":"):  # comments keep a connection alive through a long prefill
                self._call.first_byte_at = self._last_at = now
            if self._last_at and not finished:  # what follows the last token comes at once
                self._call.events += out.count(b"\n\n")
                self._call.last_event_at = now
            self._outlet.put({"type": "http.response.body", "body": out, "more_body": True})
        if complete:
            if not self._committed:
                self._settle(Verdict.LOST)
                return
            self._end_stream(clean=True)
            self._settle(Verdict.SERVED if self._ended_well() else Verdict.BROKEN)

    def _commit(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._committed = self._call.started = True
        headers.append((b"content-type", self._headers[b"content-type"]))
        headers.append((b"x-tidegate-replica", self._call.replica))
        self._outlet.put(self._call.head(200, headers))

    def _end_stream(self, *, clean: bool) -> None:
        last = b""
        if (refused := self._tail.end(clean=clean)) is not None:
            last = self._tail.error_event(refused)
        self._call.answered = True
        self._outlet.put({"type": "http.response.body", "body": last, "more_body": False})

    def _ended_well(self) -> bool:
        return self._stream and not self._tail.failed

    def _collect(self, data: bytes, complete: bool) -> None:
        assert self._error is not None
        self._error += data
        if not complete and len(self._error) <= MAX_ERROR_BYTES:
            return
        if not complete:
            self._connection.abort(self)
        retry_after = self._headers.get(b"retry-after")
        if self._status == 503 and (reason := self._headers.get(REFUSAL_HEADER)) is not None:
            self.reason = _REASONS.get(reason, Refusal.BUSY)
            # An engine that died under the request charges it as a lost connection would.
            self._settle(Verdict.LOST if self.reason is Refusal.REPLICA_LOST else Verdict.REFUSED)
        elif 400 <= self._status < 500 and self._status not in (401, 403, 407):
            self.refused = from_upstream(self._status, bytes(self._error), retry_after, self._call.route)
            self._settle(Verdict.REJECTED)
        else:
            why = Refusal.NO_REPLICA if self._status == 503 else Refusal.UPSTREAM_FAILED
            wait = int(retry_after) if retry_after is not None and retry_after.isdigit() else None
            self.refused = Refused(why, "The replica failed to answer the request.", retry_after_s=wait)
            self._settle(Verdict.FAILED)

    def _settle(self, verdict: Verdict) -> None:
        if not self.done.done():
            self.done.set_result(verdict)

    def _fail(self, error: Exception) -> None:
        self._connection.abort(self)
        if not self.done.done():
            self.done.set_exception(error)


_REASONS = {
    str(reason).encode(): reason
    for reason in (Refusal.BUSY, Refusal.DRAINING, Refusal.STARTING, Refusal.REPLICA_LOST)
}
