"""Entries of log files in one form: those of Tidegate's processes, of vLLM, of Ray, and other output."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

LEVELS = ("debug", "info", "warning", "error", "critical")

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
# vLLM: (EngineCore pid=7) INFO 07-14 09:00:00 [core.py:77] text
_VLLM = re.compile(rf"(?:\(.*?\) )?{_LEVEL} (?P<at>\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? (?P<text>.*)")
# Ray, and Python's logging: 2026-07-14 09:00:00,123 INFO text
_PYTHON = re.compile(
    rf"\[?(?P<at>\d{{4}}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d{{3}})\]?[\s:]*(?:{_LEVEL}\b)?\W*(?P<text>.*)"
)
_UVICORN = re.compile(rf"{_LEVEL}: +(?P<text>.*)")
# A process that ends so has no other line at that level.
_CRASH = re.compile(r"Traceback \(most recent call last\):|Fatal Python error")
# The process names the worker.
_SHOWN_ELSEWHERE = frozenset({"at", "level", "event", "worker", "traceback"})


class LogEntry(NamedTuple):
    """One line of output: its instant in Unix seconds, one of :data:`LEVELS`, its process, its text."""

    at: float
    level: str
    process: str
    text: str

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.at).astimezone().isoformat(timespec="milliseconds")
        return f"{at} {self.level.upper():<8} {self.process:<14} {self.text}"


class _Line(NamedTuple):
    """What a line says of itself; output without a form has neither instant nor level."""

    at: float | None
    level: str | None
    texts: tuple[str, ...]


def entries(process: str, lines: Iterable[str], now: float) -> list[LogEntry]:
    """The entries of consecutive lines. ``now`` is the instant of lines that no line with an instant follows.

    A line without an instant or level has that of the line before, as in a traceback.
    """
    parsed = [_parse(line, now) for line in lines]
    at = next((line.at for line in parsed if line.at is not None), now)
    level = "info"
    found = []
    for line in parsed:
        at = line.at or at
        level = line.level or level
        found += [LogEntry(at, level, process, text) for text in line.texts]
    return found


def _parse(raw: str, now: float) -> _Line:
    raw = _COLOR.sub("", raw)
    if raw.startswith("{") and (own := _own(raw)) is not None:
        return own
    if match := _VLLM.fullmatch(raw):
        return _Line(_without_year(match["at"], now), match["level"].lower(), (match["text"],))
    if match := _PYTHON.fullmatch(raw):
        level = (match["level"] or "info").lower()
        with suppress(ValueError):  # it only looked like an instant
            at = datetime.fromisoformat(match["at"].replace(",", ".")).astimezone().timestamp()
            return _Line(at, level, (match["text"],))
    if match := _UVICORN.fullmatch(raw):
        return _Line(None, match["level"].lower(), (match["text"],))
    return _Line(None, "error" if _CRASH.match(raw) else None, (raw,))


def _own(raw: str) -> _Line | None:
    """A line of :mod:`store.json_log_format`."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
        at, level = datetime.fromisoformat(fields["at"]).timestamp(), fields["level"]
        first, *others = str(fields["event"]).splitlines() or [""]
        places = [f"  {place}" for place in fields.get("traceback", ())]
        LEVELS.index(level)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return None
    shown = [f"{key}={_value(value)}" for key, value in fields.items() if _is_shown(key, value)]
    return _Line(at, level, (" ".join([first, *shown]), *others, *places))


def _is_shown(key: str, value: object) -> bool:
    return key not in _SHOWN_ELSEWHERE and value is not None


def _value(value: object) -> str:
    if isinstance(value, str) and value and not re.search(r'[\s"=]', value):
        return value
    return msgspec.json.encode(value).decode()


def _without_year(text: str, now: float) -> float:
    """The latest instant of that day and time, with a day for a clock that was set back."""
    latest = datetime.fromtimestamp(now) + timedelta(days=1)
    for year in range(latest.year, latest.year - 8, -1):
        try:
            at = datetime.strptime(f"{year}-{text}", "%Y-%m-%d %H:%M:%S")
        except ValueError:  # February 29
            continue
        if at <= latest:
            return at.timestamp()
    return now
