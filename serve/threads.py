"""Blocking work off the event loop, in threads that do not delay the end of the process."""

from __future__ import annotations

import asyncio
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
