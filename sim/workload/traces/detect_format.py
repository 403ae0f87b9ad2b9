"""Opening a trace: its first line determines the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from policy.errors import ConfigError
from policy.wire.capture import CaptureHeader, CaptureLine
from sim.arrivals import Arrival
from sim.workload.traces.formats import (
    AZURE_COLUMNS,
    BURSTGPT_COLUMNS,
    SERVEGEN_COLUMNS,
    MooncakeLine,
    read_azure,
    read_burstgpt,
    read_capture,
    read_mooncake,
    read_servegen,
)
from sim.workload.traces.record_readers import JsonLinesReader, LineReader, TableReader, cells


class OpenTrace(Iterator[Arrival]):
    """The requests of a trace, streamed: memory does not grow with its length.

    ``taken`` counts the requests so far, ``skipped`` the failed ones that were left out.
    """

    def __init__(self, lines: LineReader) -> None:
        self.taken = self.skipped = 0
        self._lines = lines
        # A truncated number is still valid; a truncated object is not.
        self._ends_in_number = False
        self.format, self._arrivals = self._detected(lines)

    def __next__(self) -> Arrival:
        arrival = next(self._arrivals)
        self.taken += 1
        return arrival

    def notes(self) -> list[str]:
        """Warnings about the part that was read."""
        notes = []
        name, number = self._lines.path.name, self._lines.number
        if self.skipped:
            rows = self.taken + self.skipped
            notes.append(f"{name}: {self.skipped} of {rows} rows are failed requests, left out")
        if self._lines.unended and self._ends_in_number:
            notes.append(
                f"{name}:{number}: the last line has no line end, as the others have: the file may be cut off"
            )
        return notes

    def _detected(self, lines: LineReader) -> tuple[str, Iterator[Arrival]]:
        first = next(lines, None)
        if first is None:
            raise lines.refused("", "a trace that is not empty")
        if first.lstrip().startswith("{"):
            return _of_objects(lines, first)
        header = cells(first)
        kind = max(_TABLES, key=lambda each: len(set(each.columns) & set(header)))
        found = set(kind.columns) & set(header)
        if not found:
            known = "; ".join(",".join(each.columns) for each in _TABLES)
            raise lines.refused(first, f"JSON lines or a header with the columns of a known format: {known}")
        if missing := [name for name in kind.columns if name not in header]:
            raise lines.refused(first, f"{kind.name}'s column {', '.join(missing)}, too")
        if len(set(header)) < len(header):
            raise lines.refused(first, "columns with different names")
        self._ends_in_number = header[-1] in kind.columns
        return kind.name, kind.read(TableReader(lines, header), self._skip)

    def _skip(self) -> None:
        self.skipped += 1


def open_trace(path: Path) -> OpenTrace:
    """The requests of the trace at ``path``, plain or gzip; the first is at 0 s.

    Raises :class:`policy.errors.TraceError` with the line, at once for an unknown format and otherwise when
    that line is reached; :class:`policy.errors.ConfigError` for a file that cannot be read, or only once.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(str(path), "no regular file", "a file on a disk: a trace is read several times")
    trace = OpenTrace(LineReader(path))
    if (traces := _opened.get()) is not None:
        traces.append(trace)
    return trace


@contextmanager
def opened() -> Iterator[list[OpenTrace]]:
    """Yields the list of traces opened in the ``with`` block, also by a workload."""
    traces: list[OpenTrace] = []
    token = _opened.set(traces)
    try:
        yield traces
    finally:
        _opened.reset(token)


def notes(traces: list[OpenTrace]) -> list[str]:
    """The warnings about all of them, without repetition."""
    return list(dict.fromkeys(note for trace in traces for note in trace.notes()))


_opened: ContextVar[list[OpenTrace] | None] = ContextVar("_opened", default=None)


class _TableKind(NamedTuple):
    name: str
    columns: tuple[str, ...]
    read: Callable[[TableReader, Callable[[], None]], Iterator[Arrival]]


_TABLES = (
    _TableKind("azure", AZURE_COLUMNS, lambda table, _: read_azure(table)),
    _TableKind("burstgpt", BURSTGPT_COLUMNS, read_burstgpt),
    _TableKind("servegen", SERVEGEN_COLUMNS, lambda table, _: read_servegen(table)),
)


def _of_objects(lines: LineReader, first: str) -> tuple[str, Iterator[Arrival]]:
    keys: dict[str, Any] = JsonLinesReader(lines, dict[str, Any]).decoded(first)
    if "tidegate" in keys:
        JsonLinesReader(lines, CaptureHeader).decoded(first)
        return "capture", read_capture(JsonLinesReader(lines, CaptureLine))
    if keys.keys() & set(MooncakeLine.__struct_fields__):
        return "mooncake", read_mooncake(JsonLinesReader(lines, MooncakeLine, first))
    if "models" in keys:
        raise lines.refused("a deployment file", "a trace or a workload")
    known = (
        'a header {"tidegate": "capture", ...} or Mooncake\'s keys: timestamp, input_length, output_length'
    )
    raise lines.refused(first, known)
