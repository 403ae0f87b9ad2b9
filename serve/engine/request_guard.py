"""The guard: the only way into an engine's app. It authenticates, counts, refuses and drains requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from policy.engine.performance_model import Timing
from policy.errors import AdapterRefused, EngineFailed, Refusal
from policy.routing.engine_prefix_index import NamedPrompt
from policy.types import ReplicaLoad, ReplicaPhase
from policy.wire.adapter_catalog import DIGEST, NAME
from policy.wire.headers import (
    ADAPTER_HEADER,
    CANARY_HEADER,
    DEPTHS_HEADER,
    PREFILL_HEADER,
    PREFIX_HEADER,
    SECRET_HEADER,
)
from policy.wire.load_stream import COALESCE_S, PROFILE, LoadReport
from serve.async_waiting import wait_at_most
from serve.engine import response_guard
from serve.engine.adapters.loader import AdapterLoader
from serve.engine.interface import ALLOWED, NAMED, WRITER, Engine, Message, Receive, Scope, Send
from serve.engine.response_guard import ResponseGuard

_CANARY, _SECRET = CANARY_HEADER.encode(), SECRET_HEADER.encode()
_PREFILL, _PREFIX, _NEEDS = PREFILL_HEADER.encode(), PREFIX_HEADER.encode(), ADAPTER_HEADER.encode()
_DEPTHS = DEPTHS_HEADER.encode()
_ADAPTER = re.compile(f"({NAME.pattern})@({DIGEST.pattern})")

# A load line is sent at least this often, so that a reader can tell an idle replica from a dead one.
HEARTBEAT_S = 1.0
# Prefixes kept for load lines; a new reader of the stream receives at most this many.
MAX_PREFIXES = 512
# A request that arrived less than this ago may not be in the engine's own count yet.
UNSEEN_S = 0.05
# The engine's events on a prompt come within this time of its first output.
SETTLED_S = 0.25


class RequestGuard:
    """ASGI middleware that owns a replica's in-flight count.

    Gateways route by this count. It is incremented before the engine's app sees a request and decremented
    when the app has finished it, however it ended.
    """

    def __init__(
        self, engine: Engine, adapters: AdapterLoader, *, secret: str, bound: int, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._secret = secret.encode()
        self._bound = bound
        self._clock = clock
        self._in_flight = 0
        self._emptied = asyncio.Event()
        self._serving: set[asyncio.Task[Any]] = set()
        # Prefill estimates of requests whose answer has not started, with their arrival.
        self._prefills: dict[ResponseGuard, tuple[int, float]] = {}
        self._prefixes: deque[int] = deque(maxlen=MAX_PREFIXES)
        self._prefix_count = 0
        self.state = ReplicaPhase.STARTING
        # Whether the engine's profiler records, or stands still to write.
        self.profiling = False
        self._changed = asyncio.Event()
        adapters.watch(self._notify)
        if engine.blocks is not None:
            engine.blocks.watch(self._notify)

    def become(self, state: ReplicaPhase) -> None:
        """Move to ``state``; a draining replica never becomes ready again."""
        if self.state is ReplicaPhase.DRAINING and state is ReplicaPhase.READY:
            return
        self.state = state
        self._notify()

    def reopen(self) -> None:
        """Serve again after a drain that was only meant to end in sleep."""
        if self.state is ReplicaPhase.DRAINING:
            self.state = ReplicaPhase.READY
            self._notify()

    async def emptied(self) -> None:
        """Return when no request is in flight."""
        while self._in_flight:
            self._emptied.clear()
            await self._emptied.wait()

    def cut(self) -> None:
        """Cancel every request that is in flight; those whose answer has not begun are refused."""
        for task in self._serving:
            task.cancel()

    def give_back(self) -> None:
        """Take no more requests and :meth:`cut` those in flight: gateways send them elsewhere."""
        self.become(ReplicaPhase.DRAINING)
        self.cut()

    def line(self) -> LoadReport:
        """The current load."""
        stats = self._engine.stats()
        load = ReplicaLoad(
            at=self._clock(),
            in_flight=self._in_flight,
            bound=self._bound,
            running=stats.running,
            waiting=stats.waiting,
            pending_tokens=self._pending(stats.prefilling),
            kv_used=stats.kv_used,
            tokens=stats.tokens,
        )
        return LoadReport(
            state=self.state, load=load, adapters=self._engine.adapters(), refused=self._adapters.refused()
        )

    async def lines(self) -> AsyncIterator[LoadReport]:
        """A load line now, one after each change, and at least one per :data:`HEARTBEAT_S`."""
        while True:
            changed = self._changed
            yield self.line()
            await asyncio.sleep(COALESCE_S)
            await wait_at_most(changed, HEARTBEAT_S - COALESCE_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._engine.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        given = headers.get(_SECRET, b"")
        if not hmac.compare_digest(given, self._secret):
            await response_guard.answer(
                send, 401, Refusal.UNAUTHORIZED, "the internal secret is missing or wrong"
            )
            return
        route = (scope["method"], scope["path"])
        if route == ("GET", "/internal/load"):
            await self._stream_load(receive, send)
        elif route == ("POST", PROFILE):
            await self._profile(scope, send)
        elif route not in ALLOWED:
            await response_guard.answer(send, 404, Refusal.NOT_FOUND, "a replica serves no such path")
        elif scope["method"] == "GET":
            await self._engine.app(scope, receive, send)
        elif (refusal := self._refusal(_CANARY in headers)) is not None:
            await response_guard.answer(send, 503, refusal, f"this replica is {refusal}")
        else:
            await self._count(scope, receive, send, headers)

    def _refusal(self, canary: bool) -> Refusal | None:
        if self._engine.dead and self.state is ReplicaPhase.READY:
            # The process is about to end; until then no other request should be sent here.
            self.become(ReplicaPhase.STARTING)
        if self.state is ReplicaPhase.STARTING:
            return None if canary else Refusal.STARTING
        if self.state is ReplicaPhase.ASLEEP:
            return Refusal.STARTING
        if self.state is not ReplicaPhase.READY:
            return Refusal.DRAINING
        return Refusal.BUSY if self._in_flight >= self._bound else None

    async def _count(self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]) -> None:
        timed = response_guard.ENGINE_TIME in headers
        writer = scope.get("extensions", {}).get(WRITER)
        answer = ResponseGuard(self._engine, send, self._answered, writer=writer, timed=timed)
        if writer is not None:
            scope["extensions"] = {WRITER: answer}
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._in_flight += 1
        self._prefills[answer] = (_tokens(headers.get(_PREFILL, b"")), self._clock())
        prefixes = _hashes(headers.get(_PREFIX, b""))
        self._prefixes.extend(prefixes)
        self._prefix_count += len(prefixes)
        self._notify()
        blocks = self._engine.blocks
        named = None if blocks is None else _named(prefixes, headers.get(_DEPTHS, b""))
        NAMED.set(named)
        try:
            if (wanted := headers.get(_NEEDS)) is None:
                await self._engine.app(scope, receive, answer)
            else:
                await self._adapted(scope, receive, answer, wanted)
        except asyncio.CancelledError:
            if not answer.begun:
                await response_guard.answer(
                    send, 503, Refusal.DRAINING, f"this replica is {Refusal.DRAINING}"
                )
            raise
        finally:
            self._serving.discard(task)
            self._in_flight -= 1
            if not self._in_flight:
                self._emptied.set()
            self._prefills.pop(answer, None)
            self._notify()
            if blocks is not None and named is not None:
                # Also of a request that never reached the cache, whose sender assumes that it did.
                asyncio.get_running_loop().call_later(SETTLED_S, blocks.announce, named.hashes)

    async def _adapted(self, scope: Scope, receive: Receive, answer: ResponseGuard, wanted: bytes) -> None:
        """Serve a request with its adapter, which stays loaded until the request ends."""
        found = _ADAPTER.fullmatch(wanted.decode("latin-1"))
        if found is None:
            await response_guard.answer(
                answer, 400, Refusal.BAD_REQUEST, "the header names no version of an adapter"
            )
            return
        inbox = _Inbox(receive)
        with contextlib.ExitStack() as leased:
            try:
                arrival = leased.enter_context(self._adapters.lease(*found.groups()))
                if arrival is not None and not await self._arrived(arrival, inbox, answer):
                    return
            except AdapterRefused as error:
                await response_guard.answer(answer, 503, Refusal.ADAPTER_FAILED, f"{error.code}: {error}")
                return
            except EngineFailed as error:
                await response_guard.answer(answer, 503, Refusal.REPLICA_LOST, str(error))
                return
            await self._engine.app(scope, inbox, answer)

    async def _arrived(self, arrival: asyncio.Future[float], inbox: _Inbox, answer: ResponseGuard) -> bool:
        """Wait for the adapter, and raise as its load does; false when the client has disconnected."""
        tokens, _ = self._prefills[answer]
        # While it waits it is not in the engine's own count.
        self._prefills[answer] = (tokens, math.inf)
        listening = asyncio.ensure_future(inbox.left())
        either: set[asyncio.Future[Any]] = {arrival, listening}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
            await asyncio.wait({listening})
        if not arrival.done():
            return False
        arrival.result()
        self._prefills[answer] = (tokens, self._clock())
        return True

    def _answered(self, answer: ResponseGuard) -> None:
        """The first byte of ``answer`` was sent, so its prompt is computed."""
        if self._prefills.pop(answer, None) is not None:
            self._notify()

    def _pending(self, prefilling: int) -> int:
        """Prompt tokens to compute before a request that arrives now: the lower of two estimates.

        The guard's own counts too much for answers that are not streamed, whose first byte comes with the
        last. The engine's count may include tokens that are cached.
        """
        recent = self._clock() - UNSEEN_S
        announced = sum(tokens for tokens, _ in self._prefills.values())
        on_its_way = sum(tokens for tokens, at in self._prefills.values() if at > recent)
        return min(announced, prefilling + on_its_way)

    def _prefixes_since(self, count: int) -> tuple[int, ...]:
        """The prefixes after the first ``count``, as far as they are kept."""
        new = min(self._prefix_count - count, len(self._prefixes))
        return tuple(self._prefixes)[-new:] if new else ()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _profile(self, scope: Scope, send: Send) -> None:
        if self.profiling:
            await response_guard.answer(send, 409, Refusal.BUSY, "another profile is being recorded")
            return
        self.profiling = True
        try:
            await response_guard.profile(self._engine, scope["query_string"], send)
        finally:
            self.profiling = False

    async def _stream_load(self, receive: Receive, send: Send) -> None:
        await receive()
        gone = asyncio.ensure_future(receive())
        await response_guard.start(send, 200, [(b"content-type", b"application/x-ndjson")])
        try:
            reported, told = 0, -1
            blocks = self._engine.blocks
            timing: Timing | None = self._engine.timing()
            async for line in self.lines():
                if gone.done():
                    return
                full = msgspec.structs.replace(line, timing=timing, prefixes=self._prefixes_since(reported))
                reported, timing = self._prefix_count, None
                if blocks is not None:
                    news = blocks.news(told)
                    full = msgspec.structs.replace(full, reset=news.reset, held=news.held, gone=news.gone)
                    told = news.at
                body = msgspec.json.encode(full) + b"\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            gone.cancel()


class _Inbox:
    """A request's messages, buffered so that a disconnect is seen while the app does not receive."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._received: deque[Message] = deque()

    async def __call__(self) -> Message:
        return self._received.popleft() if self._received else await self._receive()

    async def left(self) -> None:
        """Return when the client has disconnected."""
        while not self._received or self._received[-1]["type"] != "http.disconnect":
            self._received.append(await self._receive())


def _tokens(value: bytes) -> int:
    return int(value) if value.isdigit() and len(value) < 10 else 0


def _hashes(value: bytes) -> list[int]:
    """The hexadecimal hashes listed in ``value``; none if one of them is invalid."""
    try:
        hashes = [int(part, 16) for part in value.split(b",")] if value else []
    except ValueError:
        return []
    return [prefix for prefix in hashes if 0 <= prefix < 1 << 64]


def _named(new: list[int], depths: bytes) -> NamedPrompt | None:
    """The prefixes of a prompt: the deepest that the gateway knows there, and the ``new`` ones."""
    known, *ends = depths.split(b",")
    hashes = [value for value in new if not value & 1]
    try:
        tokens = [int(end) for end in ends]
    except ValueError:
        return None
    if len(tokens) != len(hashes) + 2:
        return None
    *deep, whole = tokens
    if known == b"0":
        del deep[0]
    else:
        hashes = [*_hashes(known), *hashes]
    return NamedPrompt(tuple(hashes), tuple(deep), whole) if len(deep) == len(hashes) > 0 else None
