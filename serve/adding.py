"""One adapter that is being added: what was asked for, and how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from policy.catalog import Alias
from policy.errors import AdapterRefused, TidegateError
from serve.client import AddLine, Problem
from serve.shelf import Taken
from store.preparation import Progress

# A base model and a name on it.
Key = tuple[str, str]


class Adding:
    """``parts`` are sources with their weights; ``tenants`` of ``None`` stay as they are.

    It goes on whether or not anybody watches. Threads report to it; the event loop reads ``line``. Sources
    that are ``known`` are fetched again only if what came of them is gone. Once ``revoked`` it comes to
    nothing: its name was removed meanwhile.
    """

    def __init__(
        self,
        key: Key,
        parts: tuple[tuple[str, float], ...],
        tenants: tuple[str, ...] | None,
        *,
        known: Mapping[str, Taken] | None = None,
        declared: bool = False,
    ) -> None:
        self.key = key
        self.parts = parts
        self.tenants = tenants
        self.known = known or {}
        self.declared = declared
        self.line = AddLine(step="wait", message="waiting for its turn")
        self.error: TidegateError | None = None
        self.revoked = False
        self.done = asyncio.Event()

    def report(self, progress: Progress) -> None:
        """How far it is; from any thread."""
        part = progress.fraction
        done, total = (0, None) if part is None else (round(100 * part), 100)
        self.line = AddLine(step=progress.step, message=progress.message, done=done, total=total)

    def succeed(self, alias: Alias) -> None:
        """It is durable."""
        self.line = AddLine(alias=alias)
        self.done.set()

    def fail(self, error: TidegateError) -> None:
        """Nothing was changed."""
        self.error = error
        code = error.code if isinstance(error, AdapterRefused) else ""
        self.line = AddLine(error=Problem(type=type(error).__name__, message=str(error), code=code))
        self.done.set()

    async def ended(self, timeout_s: float) -> bool:
        """Whether it came to its end, within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.done.wait()
        except TimeoutError:
            return False
        return True
