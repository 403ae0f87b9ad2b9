"""A fetch job: the source of an adapter, its target, its limits, and its partial downloads."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from policy.errors import AdapterRefused
from store.adapters.public_hosts import PublicHosts
from store.progress_report import ProgressLine, Report
from store.state_dir import write_atomic

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#]*@)?(?P<place>[^?#]*)")


class FetchJob(NamedTuple):
    """``source`` as the user wrote it, and directories of :class:`store.adapters.blobs.AdapterBlobStore`.

    ``into`` is the target, empty and private. ``parts`` is for partial downloads and outlives this process.
    ``token_file`` may contain a Hugging Face token. ``hosts`` are those that it may be fetched from; ``None``
    for any, if the deployment file declares it.
    """

    source: str
    into: Path
    parts: Path
    max_bytes: int
    report: Report
    token_file: str | None = None
    hosts: PublicHosts | None = None

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
                self.report(ProgressLine(step=step, message=message, fraction=now / 100))

        return percent

    def unreachable(self, why: object) -> AdapterRefused:
        """The error for a source that cannot be read now; a retry may succeed."""
        return AdapterRefused("source_unreachable", f"{self.shown} cannot be fetched: {why!s:.300}")

    def not_public(self, why: object) -> AdapterRefused:
        """The error for a source that leads to a host that it may not be fetched from."""
        return AdapterRefused("source_not_public", f"{self.shown} cannot be fetched: {why}")

    def too_large(self, size: int) -> AdapterRefused:
        """The error for a source with ``size`` bytes or more."""
        return AdapterRefused(
            "too_large", f"{self.shown} has {size} bytes or more; expected at most {self.max_bytes}"
        )


def redacted(source: str) -> str:
    """``source`` without user names, passwords and signed parameters, for messages and records."""
    match = _URL.match(source)
    return f"{match['scheme']}{match['place']}" if match else source


def identity(source: str, secret: str) -> str:
    """A text for records that differs for any two sources, with a keyed digest of what is secret."""
    shown = redacted(source)
    if shown == source:
        return source
    # `redacted` leaves no fragment, so that no other source has this text.
    return f"{shown}#{hmac.new(secret.encode(), source.encode(), hashlib.sha256).hexdigest()}"


class PartialDownload:
    """The file ``name`` in the ``parts`` of a job, with a validator of its source."""

    def __init__(self, job: FetchJob, name: str) -> None:
        self._job = job
        self._validator_path = job.parts / f"{name}.validator"
        self.path = job.parts / f"{name}.part"
        self.path.touch(mode=0o600)
        self.size = self.path.stat().st_size

    @property
    def validator(self) -> str:
        """The source's validator (etag or date) at the first byte; empty if it cannot be resumed."""
        return self._validator_path.read_text() if self.size and self._validator_path.exists() else ""

    def begin(self, validator: str) -> None:
        """Start again, with the current ``validator`` of the source."""
        self._validator_path.unlink(missing_ok=True)
        with self.path.open("wb"):
            self.size = 0
        if validator:
            write_atomic(self._validator_path, validator.encode())

    def append(self, block: bytes) -> None:
        """Append a block; raises :class:`policy.errors.AdapterRefused` (``too_large``)."""
        self.size += len(block)
        if self.size > self._job.max_bytes:
            raise self._job.too_large(self.size)
        with self.path.open("ab") as file:
            file.write(block)
