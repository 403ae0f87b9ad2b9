"""Events of the supervisor's start and stop, which any number of listeners follow."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

Kind = Literal["step", "done", "ready", "note", "failed", "stopping", "ended", "stopped"]

# The last events of a start and of a stop.
_LAST_OF_START = frozenset({"ready", "failed", "stopped"})
_LAST_OF_STOP = frozenset({"failed", "stopped"})


class ProgressEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event; ``fraction`` is the progress of a step, ``exit_code`` that of a failure."""

    kind: Kind
    step: str = ""
    message: str = ""
    fraction: float | None = None
    exit_code: int = 0


class ProgressLog:
    """The events of one supervisor, stored and passed to every follower."""

    def __init__(self, echo: Callable[[ProgressEvent], None]) -> None:
        self._echo = echo
        self._history: deque[ProgressEvent] = deque(maxlen=1000)
        self._followers: set[asyncio.Queue[ProgressEvent]] = set()

    def emit(self, event: ProgressEvent) -> None:
        self._history.append(event)
        # Its reader may be gone, or its file's disk full; the deployment goes on.
        with contextlib.suppress(OSError):
            self._echo(event)
        for queue in self._followers:
            queue.put_nowait(event)

    def step(self, step: str, message: str, fraction: float | None = None) -> None:
        """Progress of a step; a repeated message is dropped."""
        event = ProgressEvent(kind="step", step=step, message=message, fraction=fraction)
        if not self._history or self._history[-1] != event:
            self.emit(event)

    def done(self, step: str, message: str) -> None:
        self.emit(ProgressEvent(kind="done", step=step, message=message))

    async def follow(self, *, stop: bool) -> AsyncIterator[ProgressEvent]:
        """Events until the end of the start; with ``stop``, from now on until the end of the stop."""
        queue: asyncio.Queue[ProgressEvent] = asyncio.Queue()
        if not stop:
            for event in self._history:
                queue.put_nowait(event)
        self._followers.add(queue)
        last = _LAST_OF_STOP if stop else _LAST_OF_START
        try:
            while True:
                event = await queue.get()
                yield event
                if event.kind in last:
                    return
        finally:
            self._followers.discard(queue)
