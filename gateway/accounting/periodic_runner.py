"""Blocking work of the accounting process, each repeated in its own thread; failures are logged once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from policy.errors import TidegateError
from store.event_loop.timer_coalescing import sleep_to_next

log = logging.getLogger("tidegate.accounting")


class PeriodicTasks:
    """Tasks by name, each in a thread of its own: one that waits for the database holds up no other.

    A :class:`policy.errors.TidegateError` or ``OSError`` is logged, and the work goes on at the next turn.
    Any other error is a fault of ours: it is kept in ``failure``, and ``on_failure`` is called.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.failure: BaseException | None = None

    def start(self, name: str, every_s: float, work: Callable[[], object]) -> None:
        """Call ``work`` every ``every_s`` seconds, from now on."""
        task = self._tasks[name] = asyncio.create_task(self._repeat(name, every_s, work), name=name)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """End all tasks; what runs in a thread is waited for."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.failure = task.exception()
            self._on_failure()

    async def _repeat(self, name: str, every_s: float, work: Callable[[], object]) -> None:
        problem = ""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix=name) as thread:
            while True:
                running = loop.run_in_executor(thread, work)
                try:
                    await asyncio.shield(running)
                except asyncio.CancelledError:
                    await asyncio.wait({running})
                    raise
                except (TidegateError, OSError) as error:
                    if str(error) != problem:
                        problem = str(error)
                        log.warning("%s: %s", name, problem)
                else:
                    if problem:
                        log.info("%s works again", name)
                    problem = ""
                await sleep_to_next(every_s)
