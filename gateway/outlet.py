"""Send to a client from a callback, in order, and hold the upstream while the client is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, cast

from starlette.types import Message, Send


class Outlet:
    """An ASGI ``send`` that can be called without awaiting.

    A send that finishes at once costs no task. One that must wait for the client pauses the
    source, which then has at most one read outstanding: the buffer is bounded.
    """

    __slots__ = ("_backlog", "_pause", "_resume", "_send", "_task")

    def __init__(self, send: Send, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._send = send
        self._pause = pause
        self._resume = resume
        self._backlog: list[Message] = []
        self._task: asyncio.Task[None] | None = None

    def put(self, message: Message) -> None:
        """Send ``message`` after all that were put before it."""
        if self._task is not None:
            self._backlog.append(message)
            return
        # A cast, since checking for an abstract class costs as much as a marker scan of a chunk.
        sending = cast("Coroutine[Any, Any, None]", self._send(message))
        try:
            waits_on = sending.send(None)
        except StopIteration:
            return
        self._pause()
        self._task = asyncio.create_task(self._finish(_Begun(sending, waits_on)))

    async def _finish(self, begun: _Begun) -> None:
        try:
            await begun
            while self._backlog:
                await self._send(self._backlog.pop(0))
        finally:
            self._task = None
            self._resume()

    async def drained(self) -> None:
        """Until everything was handed to the client's connection."""
        if self._task is not None:
            await self._task

    def drop(self) -> None:
        """Nobody listens any more."""
        self._backlog.clear()
        if self._task is not None:
            self._task.cancel()


class _Begun:
    """A coroutine that was started by hand and now waits on a future: await the rest of it."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_on: Any) -> None:
        self._coroutine = coroutine
        self._waits_on = waits_on

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waits_on
        yield from self._coroutine.__await__()
