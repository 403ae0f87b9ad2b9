"""A deployment file that changes is applied again, and one that is invalid is noted once."""

from __future__ import annotations

import asyncio
from typing import Any

from policy.errors import ConfigError, EngineFailed
from tidegate.supervisor.deployment_file_watch import watch_file


async def test_changes_are_applied_once_and_refusals_noted_once() -> None:
    applied: list[Any] = []
    notes: list[str] = []
    contents: list[Any] = [
        1,
        1,
        2,
        ConfigError("a", 1, "b"),
        ConfigError("a", 1, "b"),
        2,
        ValueError("e"),
        3,
        3,
        4,
    ]
    enough = asyncio.Event()

    def note(text: str) -> None:
        notes.append(text)
        if len(notes) == 3:
            enough.set()

    refusals = iter([None, EngineFailed("starting"), None, ConfigError("c", 4, "d")])

    def read() -> Any:
        content = contents.pop(0) if len(contents) > 1 else contents[0]
        if isinstance(content, Exception):
            raise content
        return content

    async def apply(content: Any) -> None:
        if (refused := next(refusals, ConfigError("c", 4, "d"))) is not None:
            raise refused
        applied.append(content)

    task = asyncio.create_task(watch_file(read, 1, apply, note, every_s=0))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert applied == [2, 3]
    assert [note.partition(": ")[2][:1] for note in notes] == ["a", "e", "c"]
