"""Events for subscribers, from the beginning or from a stop on."""

from __future__ import annotations

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
