"""An event loop whose clock advances only when nothing is left to run: minutes pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Advances its clock by the timeout instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "no task can ever run again"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` is virtual, in seconds since the loop was made."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def pause(self, lasts_s: float) -> None:
        """Stand still for so long, as a process that is stopped."""
        self._clock.now += lasts_s


def run_virtual(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run ``main`` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
