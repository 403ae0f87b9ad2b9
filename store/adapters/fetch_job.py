"""A fetch job: the source of an adapter, the target directory and the limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from policy.errors import AdapterRefused
from store.progress import Progress, Report

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#]*@)?(?P<place>[^?#]*)")


class FetchJob(NamedTuple):
    """``source`` as the user wrote it, and directories of :class:`store.adapters.blobs.Blobs`.

    ``into`` is the target, empty and private. ``parts`` is for partial downloads and outlives this process.
    ``token_file`` may contain a Hugging Face token.
    """

    source: str
    into: Path
    parts: Path
    max_bytes: int
    report: Report
    token_file: str | None = None

    @property
    def shown(self) -> str:
        """The source without parts that may be secret."""
        return redacted(self.source)

    def progress(self, step: str, message: str) -> Callable[[float], None]:
        """A function that takes fractions and reports each whole percent of a step."""
        last = -1

        def percent(fraction: float) -> None:
            nonlocal last
            if (now := int(100 * fraction)) > last:
                last = now
                self.report(Progress(step=step, message=message, fraction=now / 100))

        return percent

    def unreachable(self, why: object) -> AdapterRefused:
        """The error for a source that cannot be read now; a retry may succeed."""
        return AdapterRefused("source_unreachable", f"{self.shown} cannot be fetched: {why!s:.300}")

    def too_large(self, size: int) -> AdapterRefused:
        """The error for a source with ``size`` bytes or more."""
        return AdapterRefused(
            "too_large", f"{self.shown} has {size} bytes or more; expected at most {self.max_bytes}"
        )


def redacted(source: str) -> str:
    """``source`` without user names, passwords and signed parameters, for messages and records."""
    match = _URL.match(source)
    return f"{match['scheme']}{match['place']}" if match else source
