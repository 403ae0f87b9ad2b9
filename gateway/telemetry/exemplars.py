"""Exemplars of latency histograms: a recent request in each bucket, over all workers of the host.

Prometheus' shared metric files have none, so each worker writes its own to a file beside them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from gateway.telemetry.metric_files import has_ended
from gateway.telemetry.traces.request_trace import read_traceparent

WRITE_EVERY_S = 5.0
# OpenMetrics allows 128 characters for names and values of an exemplar's labels.
MAX_ID = 112

# An observation of one request: its value, when it ended (of ``time.monotonic``), the request's id, and the
# client's header `traceparent`. A plain tuple, which is made on the request path.
Example = tuple[float, float, bytes, bytes | None]


class Exemplar(msgspec.Struct, frozen=True, array_like=True):
    """What is shown of an example; ``label`` says what ``id`` is, ``at`` are Unix seconds."""

    metric: str
    model: str
    bucket: int
    label: str
    id: str
    value: float
    at: float

    @property
    def key(self) -> tuple[str, str, int]:
        """Its place: of several at one the newest counts."""
        return self.metric, self.model, self.bucket


_decode = msgspec.json.Decoder(list[Exemplar]).decode


def shown(metric: str, model: str, bucket: int, example: Example, epoch: float) -> Exemplar | None:
    """The exemplar of ``example``; ``epoch`` is the Unix time at 0 of its clock."""
    value, at, request_id, traceparent = example
    label, name = "request_id", request_id.decode("ascii", "replace")
    if (parent := read_traceparent(traceparent)) is not None:
        label, name = "trace_id", parent.trace_id.decode()
    if len(name) > MAX_ID:
        return None
    return Exemplar(metric, model, bucket, label, name, value, round(at + epoch, 3))


class ExemplarStore:
    """The exemplars of this worker, and those that the others have written."""

    def __init__(self, directory: Path | None, epoch: float) -> None:
        self._directory = directory
        self._epoch = epoch
        self._mine: dict[tuple[str, str, int], Exemplar] = {}
        self._written = False

    def take(self, metric: str, model: str, examples: Mapping[int, Example]) -> None:
        """Take newer examples by bucket."""
        for bucket, example in examples.items():
            if (exemplar := shown(metric, model, bucket, example, self._epoch)) is not None:
                self._mine[exemplar.key] = exemplar
                self._written = False

    def write(self) -> None:
        """Write those of this worker for the others; may block on the disk."""
        if self._directory is None or self._written:
            return
        self._written = True
        path = _own(self._directory)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(list(self._mine.values())))
        part.replace(path)

    def all(self) -> dict[tuple[str, str, int], Exemplar]:
        """The newest of every place; may block on the disk."""
        newest = dict(self._mine)
        for exemplar in self._others():
            known = newest.get(exemplar.key)
            if known is None or known.at < exemplar.at:
                newest[exemplar.key] = exemplar
        return newest

    def _others(self) -> Iterator[Exemplar]:
        if self._directory is None:
            return
        for path in self._directory.glob("exemplars_*.json"):
            if has_ended(path):
                path.unlink(missing_ok=True)
            elif path != _own(self._directory):
                with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                    yield from _decode(path.read_bytes())


def _own(directory: Path) -> Path:
    """The file of this process."""
    return directory / f"exemplars_{os.getpid()}.json"
