"""Pings the controller and restarts one that hangs: its process is stopped, or its event loop is blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from policy.errors import TidegateError

PERIOD_S = 2.0
TIMEOUT_S = 3.0
# Pings in a row without an answer: the controller is silent for 15 to 20 s.
UNANSWERED = 4


async def watch_controller(
    hangs: Callable[[], bool],
    restart: Callable[[], Awaitable[None]],
    note: Callable[[str], None],
    period_s: float = PERIOD_S,
) -> None:
    """Watch until cancelled. ``hangs`` pings: whether there is a controller that does not answer.

    Pings are counted: a supervisor that was stopped itself does not end a controller that answers. One that
    is still starting does not hang: its port refuses.
    """
    unanswered = 0
    while True:
        await asyncio.sleep(period_s)
        unanswered = unanswered + 1 if await asyncio.to_thread(hangs) else 0
        if unanswered < UNANSWERED:
            continue
        unanswered = 0
        note("the controller does not answer; it is killed and started again")
        try:
            await restart()
        except (TidegateError, OSError) as error:
            note(f"the controller cannot be restarted: {error}")
