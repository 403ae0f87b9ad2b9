"""Timer coalescing: a process that looks for many things wakes once for all of them.

To wake an idle process takes a tenth of a millisecond, most of which is not for what it looks at.
"""

from __future__ import annotations

import asyncio


async def sleep_to_next(period_s: float) -> None:
    """Sleep until the event loop's clock is at the next multiple of ``period_s``, whole milliseconds."""
    period_ms = max(round(period_s * 1000), 1)
    now_ms = round(asyncio.get_running_loop().time() * 1000)
    await asyncio.sleep((period_ms - now_ms % period_ms) / 1000)
