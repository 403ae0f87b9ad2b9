"""The job of adding one adapter: its sources, progress and outcome."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from policy.errors import AdapterRefused, TargetError, TidegateError
from policy.wire.adapter_catalog import Alias, CatalogVersion
from policy.wire.controller import AddAdapterLine, ErrorDetails
from store.progress_report import ProgressLine

# A base model and a name on it.
Key = tuple[str, str]
# Every source that is not a path on this machine.
_REMOTE = re.compile(r"(?!file:|local:)[A-Za-z][A-Za-z0-9+.-]*://|hf:")


def is_remote(source: str) -> bool:
    """Whether ``source`` is fetched from another machine."""
    return _REMOTE.match(source) is not None


@dataclass(eq=False)
class AddAdapterJob:
    """``parts`` are sources with their weights; ``tenants`` of ``None`` keeps those of the name.

    The job continues whether or not a client watches it. Worker threads report progress; the event loop reads
    ``line``. Sources that are ``known`` are fetched again only if their files are gone. ``percent`` is the
    part of the name's requests for the new version, ``None`` for all; ``any_base`` takes an adapter that
    names another base model. A job is ``revoked`` when its name is removed: its watchers get the error and
    the next job its turn at once, and its thread ends at its next report.
    """

    key: Key
    parts: tuple[tuple[str, float], ...]
    tenants: tuple[str, ...] | None
    known: Mapping[str, CatalogVersion] = field(default_factory=dict)
    declared: bool = False
    percent: float | None = None
    any_base: bool = False
    error: TidegateError | None = field(default=None, init=False)
    revoked: bool = field(default=False, init=False)
    done: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _progress: AddAdapterLine = field(
        default=AddAdapterLine(step="wait", message="waiting for other imports"), init=False
    )
    _outcome: AddAdapterLine | None = field(default=None, init=False)

    @property
    def line(self) -> AddAdapterLine:
        """The progress, or the outcome; later reports of a thread do not change the outcome."""
        return self._outcome or self._progress

    @property
    def remote(self) -> bool:
        """Whether any source is on another machine."""
        return any(is_remote(source) for source, _ in self.parts)

    def report(self, progress: ProgressLine) -> None:
        """Report progress, from any thread; raises :class:`TargetError` once the job is revoked."""
        self.check()
        part = progress.fraction
        done, total = (0, None) if part is None else (round(100 * part), 100)
        self._progress = AddAdapterLine(step=progress.step, message=progress.message, done=done, total=total)

    def succeed(self, alias: Alias) -> None:
        """The adapter is stored durably."""
        self._end(AddAdapterLine(alias=alias))

    def fail(self, error: TidegateError) -> None:
        """The job failed and changed nothing."""
        self.error = self.error or error
        code = error.code if isinstance(error, AdapterRefused) else ""
        self._end(
            AddAdapterLine(error=ErrorDetails(type=type(error).__name__, message=str(error), code=code))
        )

    def revoke(self) -> None:
        """The name was removed."""
        self.revoked = True
        self.fail(self._removed())

    def check(self) -> None:
        """Raise :class:`TargetError` if the job is revoked."""
        if self.revoked:
            raise self._removed()

    def _end(self, line: AddAdapterLine) -> None:
        """Record the outcome; only the first one counts."""
        if self._outcome is None:
            self._outcome = line
            self.done.set()

    def _removed(self) -> TargetError:
        return TargetError(f"{self.key[1]} was removed from {self.key[0]} while it was added")
