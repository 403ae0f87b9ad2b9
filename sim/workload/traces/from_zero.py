"""Instants of a trace as seconds since its first arrival, in order."""

from __future__ import annotations

from typing import Generic, TypeVar

from sim.workload.traces.reader import Lines

T = TypeVar("T", int, float)


class Elapsed(Generic[T]):
    """Counts from the first instant, in a unit of which a second has ``per_s``.

    Raises :class:`policy.errors.TraceError` for an instant before the last one. Whole units stay exact: two
    instants that differ are never rounded past one another.
    """

    def __init__(self, lines: Lines, per_s: int) -> None:
        self._lines = lines
        self._per_s = per_s
        self._first: T | None = None
        self._last: T | None = None

    def since(self, instant: T, shown: object) -> float:
        """Seconds from the first instant to ``instant``, which is written as ``shown``."""
        if self._first is None or self._last is None:
            self._first = instant
        elif instant < self._last:
            raise self._lines.refused(shown, "an instant that is not before that of the line above")
        self._last = instant
        return (instant - self._first) / self._per_s
