"""Events for subscribers, from the beginning or from a stop on."""

from __future__ import annotations

import errno

from tidegate.supervisor.progress_events import ProgressEvent, ProgressLog


async def test_a_late_subscriber_gets_all_events() -> None:
    echoed: list[ProgressEvent] = []
    progress = ProgressLog(echoed.append)
    progress.step("model", "half", 0.5)
    progress.step("model", "half", 0.5)
    progress.done("model", "there")
    progress.emit(ProgressEvent(kind="ready"))
    received = [event async for event in progress.follow(stop=False)]
    assert [event.kind for event in received] == ["step", "done", "ready"]
    assert received == echoed


async def test_events_that_cannot_be_printed_reach_subscribers() -> None:
    def full(event: ProgressEvent) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    progress = ProgressLog(full)
    progress.emit(ProgressEvent(kind="note", message="a child exited"))
    progress.emit(ProgressEvent(kind="failed"))
    assert [event.kind async for event in progress.follow(stop=False)] == ["note", "failed"]
