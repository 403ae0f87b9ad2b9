"""What shall be fetched, where to, and how much of it at most."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from policy.errors import AdapterRefused
from store.progress import Progress, Report

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#]*@)?(?P<place>[^?#]*)")


class FetchJob(NamedTuple):
    """``source`` as the user wrote it, and the directories of :class:`store.adapters.blobs.Blobs` to fetch it
    with.

    ``into`` is empty and private. ``parts`` outlives this process, for what takes long. ``token_file`` may
    hold a Hugging Face token.
    """

    source: str
    into: Path
    parts: Path
    max_bytes: int
    report: Report
    token_file: str | None = None

    @property
    def shown(self) -> str:
        """The source without what may be a secret in it."""
        return redacted(self.source)

    def progress(self, step: str, message: str) -> Callable[[float], None]:
        """What reports each whole percent of a step, from fractions."""
        last = -1

        def percent(fraction: float) -> None:
            nonlocal last
            if (now := int(100 * fraction)) > last:
                last = now
                self.report(Progress(step=step, message=message, fraction=now / 100))

        return percent

    def unreachable(self, why: object) -> AdapterRefused:
        """The refusal of a source that cannot be read, which may yet be."""
        return AdapterRefused("source_unreachable", f"{self.shown} cannot be fetched: {why!s:.300}")

    def too_large(self, size: int) -> AdapterRefused:
        """The refusal of a source with ``size`` bytes or more."""
        return AdapterRefused(
            "too_large", f"{self.shown} has {size} bytes or more; expected at most {self.max_bytes}"
        )


def redacted(source: str) -> str:
    """``source`` as it may be told and recorded: names and passwords, and signed parameters, are left out."""
    match = _URL.match(source)
    return f"{match['scheme']}{match['place']}" if match else source
