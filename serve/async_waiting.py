"""Waiting in the event loop: for events with a timeout, and for blocking work.

Its threads do not delay the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], name: str) -> T:
    """What ``work`` returns or raises.

    The end of the process does not wait for the thread, unlike those of an executor: a download may take an
    hour. Cancelling ends the wait, not the work.
    """
    outcome: Future[T] = Future()
    # A running future cannot be cancelled, so that its thread can always set the outcome.
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller handles it
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for ``event``, at most ``timeout_s`` seconds; whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
