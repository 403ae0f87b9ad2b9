"""The lines of every process's log: one JSON object each, with the instant, the level and the event.

``traceback`` has the places of an error, outermost first, as ``MODULE:LINE FUNCTION``: neither a path of this
machine, nor a text of the error, which may quote what a client sent.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import TracebackType

import msgspec

from store.log_file import RotatingLog

Field = str | int | float | bool | list[str] | None

# Of a recursion only its last places are logged.
MAX_PLACES = 30


def line(level: str, event: str, fields: Mapping[str, Field]) -> bytes:
    """One line, with its newline."""
    return msgspec.json.encode({"at": datetime.now(UTC), "level": level, "event": event, **fields}) + b"\n"


def error_fields(error: BaseException) -> dict[str, Field]:
    """The type of ``error``, and the places that it passed, with those of its causes."""
    return {"error": _name(error), "traceback": list(_places(error))}


def _places(error: BaseException) -> Iterator[str]:
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        if seen:
            yield f"caused by {_name(cause)}"
        seen.add(id(cause))
        yield from _frames(cause.__traceback__)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _frames(trace: TracebackType | None) -> list[str]:
    places = []
    while trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_globals.get("__name__", "?")
        places.append(f"{module}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return places[-MAX_PLACES:]


def _name(error: BaseException) -> str:
    name = type(error).__name__
    known = errno.errorcode.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{name} {known}" if known else name


class LineFormatter(logging.Formatter):
    """Python's logging in the same lines, with the texts of errors: for processes that serve no prompts."""

    def format(self, record: logging.LogRecord) -> str:
        own = record.name.startswith("tidegate")
        fields: dict[str, Field] = {} if own else {"logger": record.name}
        if record.exc_info and (error := record.exc_info[1]) is not None:
            fields |= error_fields(error) | {"error": f"{_name(error)}: {error}"}
        return line(record.levelname.lower(), record.getMessage(), fields).decode().rstrip("\n")


class FileHandler(logging.Handler):
    """Writes Python's logging to a rotated file."""

    def __init__(self, log: RotatingLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._log.write(self.format(record).encode() + b"\n")
        except OSError:  # a full disk loses lines
            return
        except Exception:  # noqa: BLE001 - as Python's handlers: a record that cannot be formatted
            self.handleError(record)

    def close(self) -> None:
        self._log.close()
        super().close()


def log_to(handler: logging.Handler, name: str = "") -> None:
    """Let ``handler`` alone write the lines of this process's logger ``name``, or of all."""
    handler.setFormatter(LineFormatter())
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
