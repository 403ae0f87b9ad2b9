"""Recent load failures, with a back-off: not every request for a broken adapter tries to load it again."""

from __future__ import annotations

from dataclasses import dataclass

from policy.errors import AdapterRefused
from policy.stats.backoff import Backoff

BACKOFF = Backoff(5.0, 300.0)
# Failures that are kept; beyond that the oldest is dropped.
MAX_KEPT = 1024


@dataclass(slots=True)
class _Failure:
    error: AdapterRefused
    attempts: int
    until: float


class LoadFailures:
    """The failures by serving name. Instants are seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self._kept: dict[str, _Failure] = {}

    def add(self, served: str, error: AdapterRefused, now: float) -> None:
        """Record a failure: no retry for 5 s, twice as long after each further failure in a row."""
        attempts = 1
        if (last := self._kept.pop(served, None)) is not None:
            attempts += last.attempts
        self._kept[served] = _Failure(error, attempts, now + BACKOFF.delay_s(attempts))
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def standing(self, served: str, now: float) -> AdapterRefused | None:
        """A new error that says why ``served`` is not retried yet; ``None`` when it may be."""
        failure = self._kept.get(served)
        if failure is None or now >= failure.until:
            return None
        return AdapterRefused(failure.error.code, str(failure.error))

    def forget(self, served: str) -> None:
        """It was loaded; the next failure is the first of a row."""
        self._kept.pop(served, None)

    def names(self, now: float) -> tuple[str, ...]:
        """Serving names that are not retried yet. Also drops failures that expired long ago."""
        for served in [s for s, failure in self._kept.items() if now > failure.until + BACKOFF.max_s]:
            del self._kept[served]
        return tuple(served for served, failure in self._kept.items() if now < failure.until)
