"""A partial download, which outlives the process and is resumed."""

from __future__ import annotations

from store.adapters.fetch_job import FetchJob
from store.state_dir import write_atomic


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
