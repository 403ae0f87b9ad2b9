"""The lines of a trace, one in memory at a time, and refusals that say which one it was."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from policy.errors import ConfigError, TraceError

# A prompt of ten million tokens has some 20,000 blocks, whose hashes take half of this.
MAX_LINE_BYTES = 1 << 20
# What a refusal shows of a line.
_SHOWN = 80
# How a gzip file begins, whatever it is called; no text does.
_PACKED = b"\x1f\x8b"


class Lines:
    """The lines of the text at ``path``, unpacked where it is a gzip file, without their ends.

    ``number`` is that of the line read last, from 1; ``unended`` is whether it alone had no line end, as
    where a file was cut off. Raises :class:`policy.errors.TraceError` for bytes that are no UTF-8, for a line
    over :data:`MAX_LINE_BYTES`, for an empty line before another one, and for a packed file that is cut off;
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
        """What to raise about ``value`` in the line read last, or in ``line``."""
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
                    # Spreadsheets put a mark before the first character.
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
