"""A file that is fetched little by little: what is there outlives the process, and is gone on with."""

from __future__ import annotations

from store.adapters.fetch_job import FetchJob
from store.state_dir import write_atomic


class PartialDownload:
    """The file ``name`` of an job's ``parts``, with what tells whether its source is still the same."""

    def __init__(self, job: FetchJob, name: str) -> None:
        self._job = job
        self._said = job.parts / f"{name}.validator"
        self.path = job.parts / f"{name}.part"
        self.path.touch(mode=0o600)
        self.size = self.path.stat().st_size

    @property
    def validator(self) -> str:
        """What the source said of itself when the first byte of this came; empty if nothing can go on."""
        return self._said.read_text() if self.size and self._said.exists() else ""

    def begin(self, validator: str) -> None:
        """Throw away what is there, of a source that says ``validator`` of itself."""
        self._said.unlink(missing_ok=True)
        with self.path.open("wb"):
            self.size = 0
        if validator:
            write_atomic(self._said, validator.encode())

    def append(self, block: bytes) -> None:
        """Write what comes next; raises :class:`policy.errors.AdapterRefused` (``too_large``)."""
        self.size += len(block)
        if self.size > self._job.max_bytes:
            raise self._job.too_large(self.size)
        with self.path.open("ab") as file:
            file.write(block)
