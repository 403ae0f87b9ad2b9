"""The job of adding one adapter: its sources, progress and outcome."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import NamedTuple

from policy.errors import AdapterRefused, TargetError, TidegateError
from policy.wire.catalog import Alias
from policy.wire.controller import AddLine, Problem
from store.preparation_progress import Progress

# A base model and a name on it.
Key = tuple[str, str]
# Every source that is not a path on this machine.
_REMOTE = re.compile(r"(?!file:|local:)[A-Za-z][A-Za-z0-9+.-]*://|hf:")


def is_remote(source: str) -> bool:
    """Whether ``source`` is fetched from another machine."""
    return _REMOTE.match(source) is not None


class ImportedAdapter(NamedTuple):
    """An adapter that is stored under its ``digest``: ``size`` in bytes, ``source`` without secrets."""

    digest: str
    rank: int
    size: int
    source: str


class AddJob:
    """``parts`` are sources with their weights; ``tenants`` of ``None`` keeps those of the name.

    The job continues whether or not a client watches it. Worker threads report progress; the event loop reads
    ``line``. Sources that are ``known`` are fetched again only if their files are gone. A job is ``revoked``
    when its name is removed: its watchers get the error at once, and its thread ends at its next report.
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
        self._moving = AddLine(step="wait", message="waiting for other imports")
        self._ended: AddLine | None = None
        self.error: TidegateError | None = None
        self.revoked = False
        self.done = asyncio.Event()

    @property
    def line(self) -> AddLine:
        """The progress, or the outcome; later reports of a thread do not change the outcome."""
        return self._ended or self._moving

    @property
    def remote(self) -> bool:
        """Whether any source is on another machine."""
        return any(is_remote(source) for source, _ in self.parts)

    def report(self, progress: Progress) -> None:
        """Report progress, from any thread; raises :class:`TargetError` once the job is revoked."""
        self.check()
        part = progress.fraction
        done, total = (0, None) if part is None else (round(100 * part), 100)
        self._moving = AddLine(step=progress.step, message=progress.message, done=done, total=total)

    def succeed(self, alias: Alias) -> None:
        """The adapter is stored durably."""
        self._end(AddLine(alias=alias))

    def fail(self, error: TidegateError) -> None:
        """The job failed and changed nothing."""
        self.error = self.error or error
        code = error.code if isinstance(error, AdapterRefused) else ""
        self._end(AddLine(error=Problem(type=type(error).__name__, message=str(error), code=code)))

    def revoke(self) -> None:
        """The name was removed."""
        self.revoked = True
        self.fail(self._removed())

    def check(self) -> None:
        """Raise :class:`TargetError` if the job is revoked."""
        if self.revoked:
            raise self._removed()

    async def ended(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for the end; whether it has ended."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.done.wait()
        except TimeoutError:
            return False
        return True

    def _end(self, line: AddLine) -> None:
        """Record the outcome; only the first one counts."""
        if self._ended is None:
            self._ended = line
            self.done.set()

    def _removed(self) -> TargetError:
        return TargetError(f"{self.key[1]} was removed from {self.key[0]} while it was added")
