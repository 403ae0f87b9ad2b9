"""Readers of trace files: lines, CSV rows and JSON objects, one in memory at a time, with errors by line."""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from policy.errors import ConfigError, TraceError
from policy.wire.capture import BLOCK_TOKENS, MAX_TOKENS

# A prompt of ten million tokens has about 20,000 blocks, whose hashes take half of this.
MAX_LINE_BYTES = 1 << 20
# Characters of a line in an error message.
_SHOWN = 80
# The magic bytes of gzip.
_PACKED = b"\x1f\x8b"


class LineReader:
    """The lines of the text file at ``path``, plain or gzip, without line ends.

    ``number`` is that of the line read last, from 1; ``unended`` says that it has no line end although others
    have, as in a truncated file. Raises :class:`policy.errors.TraceError` for invalid UTF-8, a line over
    :data:`MAX_LINE_BYTES`, an empty line before another one, and a truncated gzip file;
    :class:`policy.errors.ConfigError` for a file that cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self.unended = False
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise ConfigError(str(path), error.strerror, "a trace that can be read") from None
        self._lines = self._read()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._lines)

    def refused(self, value: object, expected: str, line: int | None = None) -> TraceError:
        """The error to raise about ``value`` in the line read last, or in ``line``."""
        shown = f"{value[:_SHOWN]}..." if isinstance(value, str) and len(value) > _SHOWN else value
        return TraceError(str(self.path), line or max(1, self.number), shown, expected)

    def _read(self) -> Iterator[str]:
        blank = 0
        with self.path.open("rb") as plain, _unpacked(plain) as file:
            while True:
                try:
                    raw = file.readline(MAX_LINE_BYTES + 1)
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise self.refused(str(error), "a whole gzip file", self.number + 1) from None
                if not raw:
                    return
                self.number += 1
                self.unended = self.number > 1 and not raw.endswith((b"\r", b"\n"))
                if len(raw) > MAX_LINE_BYTES:
                    raise self.refused(f"over {MAX_LINE_BYTES} bytes", f"at most {MAX_LINE_BYTES} a line")
                try:
                    # Spreadsheets write a byte order mark.
                    text = raw.decode("utf-8-sig" if self.number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise self.refused(f"byte {error.start}", "UTF-8 text") from None
                if not text:
                    blank = blank or self.number
                elif blank:
                    raise self.refused("", "a line that is not empty", blank)
                else:
                    yield text


def _unpacked(file: BufferedReader) -> BufferedReader | gzip.GzipFile:
    return gzip.GzipFile(fileobj=file) if file.peek(len(_PACKED)).startswith(_PACKED) else file


_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)


def cells(line: str) -> list[str]:
    """The stripped cells of one CSV line; a single cell where its quotes are invalid."""
    try:
        row = next(csv.reader([line])) if '"' in line else line.split(",")
    except csv.Error:
        row = [line]
    return [cell.strip() for cell in row]


class TableReader:
    """The rows below ``header`` as cells; ``at`` is the index of each column.

    Raises :class:`policy.errors.TraceError` for a row with another number of cells.
    """

    def __init__(self, lines: LineReader, header: list[str]) -> None:
        self.lines = lines
        self.at: Mapping[str, int] = {name: i for i, name in enumerate(header)}
        self._header = header

    def __iter__(self) -> Iterator[list[str]]:
        for line in self.lines:
            row = cells(line)
            if len(row) != len(self._header):
                raise self.lines.refused(line, f"{len(self._header)} values: {','.join(self._header)}")
            yield row

    def number(self, row: list[str], column: str) -> float:
        """The finite, non-negative number in ``column``."""
        text = row[self.at[column]]
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not 0.0 <= value < math.inf:
            raise self.lines.refused(text, f"a number of at least 0 in {column}")
        return value

    def tokens(self, row: list[str], column: str, least: int = 1) -> int:
        """The whole number in ``column``, at least ``least``."""
        text = row[self.at[column]]
        # pandas writes an integer column with gaps as floats: 12.0.
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not (least <= value <= MAX_TOKENS and value.is_integer()):
            raise self.lines.refused(text, f"a whole number, {least}..{MAX_TOKENS}, in {column}")
        return int(value)


T = TypeVar("T")
Instant = TypeVar("Instant", int, float)


class JsonLinesReader(Generic[T]):
    """Each line as a ``kind``; raises :class:`policy.errors.TraceError` for an invalid one."""

    def __init__(self, lines: LineReader, kind: type[T], first: str | None = None) -> None:
        self.lines = lines
        self._decoder = msgspec.json.Decoder(kind)
        self._first = first

    def __iter__(self) -> Iterator[T]:
        if self._first is not None:
            yield self.decoded(self._first)
        for line in self.lines:
            yield self.decoded(line)

    def decoded(self, line: str) -> T:
        """``line``, which was read last, as an object."""
        try:
            return self._decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self.lines.refused(line, f"an object of this format: {error}") from None

    def blocks(self, hashes: tuple[int, ...], input_tokens: int) -> tuple[int, ...]:
        """``hashes``; raises a trace error for more blocks than ``input_tokens`` can have."""
        if len(hashes) > (most := -(-input_tokens // BLOCK_TOKENS)):
            expected = f"at most {most}, one for each {BLOCK_TOKENS} of {input_tokens} tokens"
            raise self.lines.refused(f"{len(hashes)} hashes", expected)
        return hashes


class ElapsedSeconds(Generic[Instant]):
    """Seconds since the first instant; ``per_s`` units make a second.

    Raises :class:`policy.errors.TraceError` for a decreasing instant. Integer units stay exact: rounding
    never reorders two instants.
    """

    def __init__(self, lines: LineReader, per_s: int) -> None:
        self._lines = lines
        self._per_s = per_s
        self._first: Instant | None = None
        self._last: Instant | None = None

    def since(self, instant: Instant, shown: object) -> float:
        """Seconds from the first instant to ``instant``, which is written as ``shown``."""
        if self._first is None or self._last is None:
            self._first = instant
        elif instant < self._last:
            raise self._lines.refused(shown, "an instant that is not before that of the line above")
        self._last = instant
        return (instant - self._first) / self._per_s
