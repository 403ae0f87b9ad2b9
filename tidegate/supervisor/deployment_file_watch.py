"""Applies the deployment file again when it changes, such as a mounted ConfigMap."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from policy.errors import EngineFailed, Unreachable

LOOK_EVERY_S = 2.0


async def watch_file(
    read: Callable[[], dict[str, Any]],
    applied: object,
    apply: Callable[[dict[str, Any]], Awaitable[None]],
    note: Callable[[str], None],
    every_s: float = LOOK_EVERY_S,
) -> None:
    """Apply what ``read`` returns when it differs from what was ``applied`` last, until cancelled.

    A file that cannot be read or applied leaves the deployment as it is, and is noted once.
    """
    noted = ""
    while True:
        await asyncio.sleep(every_s)
        try:
            content = await asyncio.to_thread(read)
            if content != applied:
                await apply(content)
                applied = content
            noted = ""
        except (EngineFailed, Unreachable):
            continue  # it still starts, or the controller does not answer: again
        except Exception as error:  # noqa: BLE001 - whatever is wrong with this file, a later one may be right
            problem = str(error) or type(error).__name__
            if noted != problem:
                noted = problem
                note(f"the changed deployment file is not applied: {noted}")
