"""Structured lines on standard error: names and numbers, never content of a request."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO

from store.json_log_format import Field, error_fields, line


class StructuredLog:
    """One JSON object a line; of an error its type and places, as its text may quote a request."""

    def __init__(self, worker: int, stream: TextIO | None = None) -> None:
        self._worker = worker
        self._stream = stream or sys.stderr

    def info(self, event: str, **fields: Field) -> None:
        self.write("info", event, None, fields)

    def warning(self, event: str, *, cause: BaseException | None = None, **fields: Field) -> None:
        self.write("warning", event, cause, fields)

    def error(self, event: str, *, cause: BaseException | None = None, **fields: Field) -> None:
        self.write("error", event, cause, fields)

    def write(self, level: str, event: str, cause: BaseException | None, fields: dict[str, Field]) -> None:
        described = {} if cause is None else error_fields(cause)
        # A full disk loses lines, not requests.
        with contextlib.suppress(OSError):
            self._stream.write(line(level, event, {"worker": self._worker, **fields, **described}).decode())
            self._stream.flush()


# Whose templates are no text of a client.
_TEXTLESS = ("uvicorn", "opentelemetry")


class LibraryHandler(logging.Handler):
    """Python's logging in the same form: the error, and of libraries without texts of clients the template.

    Other texts may hold what a client sent.
    """

    def __init__(self, log: StructuredLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        template = str(record.msg).strip() if record.name.startswith(_TEXTLESS) else None
        cause = record.exc_info[1] if record.exc_info else None
        fields: dict[str, Field] = {"logger": record.name, "template": template}
        self._log.write(record.levelname.lower(), "library", cause, fields)
