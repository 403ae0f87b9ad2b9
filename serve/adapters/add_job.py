"""One adapter that is being added: what was asked for, and how far it is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from policy.errors import AdapterRefused, TargetError, TidegateError
from policy.wire.catalog import Alias
from policy.wire.controller import AddLine, Problem
from serve.adapters.store_port import ImportedAdapter
from store.progress import Progress

# A base model and a name on it.
Key = tuple[str, str]
# All that is no path; of the others it is not this machine alone that says how long they take.
_REMOTE = re.compile(r"(?!file:|local:)[A-Za-z][A-Za-z0-9+.-]*://|hf:")


def is_remote(source: str) -> bool:
    """Whether ``source`` is fetched from another machine."""
    return _REMOTE.match(source) is not None


class AddJob:
    """``parts`` are sources with their weights; ``tenants`` of ``None`` stay as they are.

    It goes on whether or not anybody watches. Threads report to it; the event loop reads ``line``. Sources
    that are ``known`` are fetched again only if what came of them is gone. Once ``revoked`` it comes to
    nothing: its name was removed meanwhile. Whoever waits is told at once, and its work ends when it reports
    next.
    """

    def __init__(
        self,
        key: Key,
        parts: tuple[tuple[str, float], ...],
        tenants: tuple[str, ...] | None,
        *,
        known: Mapping[str, ImportedAdapter] | None = None,
        declared: bool = False,
    ) -> None:
        self.key = key
        self.parts = parts
        self.tenants = tenants
        self.known = known or {}
        self.declared = declared
        self._moving = AddLine(step="wait", message="waiting for its turn")
        self._ended: AddLine | None = None
        self.error: TidegateError | None = None
        self.revoked = False
        self.done = asyncio.Event()

    @property
    def line(self) -> AddLine:
        """How far it is, or what came of it: a thread that still reports then changes nothing."""
        return self._ended or self._moving

    @property
    def remote(self) -> bool:
        """Whether any of it is fetched from another machine."""
        return any(is_remote(source) for source, _ in self.parts)

    def report(self, progress: Progress) -> None:
        """How far it is; from any thread. Raises :class:`TargetError` once it is revoked."""
        self.check()
        part = progress.fraction
        done, total = (0, None) if part is None else (round(100 * part), 100)
        self._moving = AddLine(step=progress.step, message=progress.message, done=done, total=total)

    def succeed(self, alias: Alias) -> None:
        """It is durable."""
        self._end(AddLine(alias=alias))

    def fail(self, error: TidegateError) -> None:
        """Nothing was changed."""
        self.error = self.error or error
        code = error.code if isinstance(error, AdapterRefused) else ""
        self._end(AddLine(error=Problem(type=type(error).__name__, message=str(error), code=code)))

    def revoke(self) -> None:
        """Its name is removed."""
        self.revoked = True
        self.fail(self._removed())

    def check(self) -> None:
        """Raises :class:`TargetError` once it is revoked."""
        if self.revoked:
            raise self._removed()

    async def ended(self, timeout_s: float) -> bool:
        """Whether it came to its end, within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.done.wait()
        except TimeoutError:
            return False
        return True

    def _end(self, line: AddLine) -> None:
        """Only the first end is one: who waits was told of that."""
        if self._ended is None:
            self._ended = line
            self.done.set()

    def _removed(self) -> TargetError:
        return TargetError(f"{self.key[1]} was removed from {self.key[0]} while it was added")
