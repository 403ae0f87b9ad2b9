"""Structured lines on standard error: names and numbers, never content of a request."""

from __future__ import annotations

import contextlib
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

import msgspec

Field = str | int | float | bool | None


class Log:
    """One JSON object a line."""

    def __init__(self, worker: int, stream: TextIO | None = None) -> None:
        self._worker = worker
        self._stream = stream or sys.stderr

    def info(self, event: str, **fields: Field) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Field) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Field) -> None:
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Field]) -> None:
        line = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "event": event,
            "worker": self._worker,
            **fields,
        }
        # A full disk loses lines, not requests.
        with contextlib.suppress(OSError):
            self._stream.write(msgspec.json.encode(line).decode() + "\n")
            self._stream.flush()


class LibraryHandler(logging.Handler):
    """Python's logging in the same form: the exception's type and, of uvicorn alone, the message.

    Other texts and tracebacks may hold what a client sent.
    """

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        kind = record.exc_info[0] if record.exc_info else None
        self._log.warning(
            "library",
            logger=record.name,
            severity=record.levelname,
            template=str(record.msg).strip() if record.name.startswith("uvicorn") else None,
            error=kind.__name__ if kind is not None else None,
        )
