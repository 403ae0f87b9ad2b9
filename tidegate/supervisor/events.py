"""What the supervisor is doing, as events that any number of listeners follow from the beginning."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

STEPS = ("environment", "model", "ray", "replica", "gateway")
Kind = Literal["step", "done", "ready", "note", "failed", "stopping", "ended", "stopped"]

# After these nothing follows that a listener of a start (or of a stop) waits for.
_LAST_OF_START = frozenset({"ready", "failed", "stopped"})
_LAST_OF_STOP = frozenset({"failed", "stopped"})


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened; ``fraction`` says how far a step is, ``exit_code`` why it failed."""

    kind: Kind
    step: str = ""
    message: str = ""
    fraction: float | None = None
    exit_code: int = 0


class Progress:
    """The events of one supervisor: kept, and handed to every follower."""

    def __init__(self, echo: Callable[[Event], None]) -> None:
        self._echo = echo
        self._history: deque[Event] = deque(maxlen=1000)
        self._followers: set[asyncio.Queue[Event]] = set()

    def emit(self, event: Event) -> None:
        """Add an event and tell every follower."""
        self._history.append(event)
        self._echo(event)
        for queue in self._followers:
            queue.put_nowait(event)

    def step(self, step: str, message: str, fraction: float | None = None) -> None:
        """A step goes on; a message that says nothing new is dropped."""
        event = Event(kind="step", step=step, message=message, fraction=fraction)
        if not self._history or self._history[-1] != event:
            self.emit(event)

    def done(self, step: str, message: str) -> None:
        """A step is finished."""
        self.emit(Event(kind="done", step=step, message=message))

    async def follow(self, *, stop: bool) -> AsyncIterator[Event]:
        """Events until the start is over; with ``stop``, those from now on until all has ended."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
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
