"""Loads that failed lately: an adapter that was refused is not tried again by each request for it."""

from __future__ import annotations

from dataclasses import dataclass

from policy.errors import AdapterRefused
from policy.stats.backoff import Backoff

BACKOFF = Backoff(5.0, 300.0)
# More are forgotten, the oldest first: names come from the catalog, yet nothing grows without bound.
MAX_KEPT = 1024


@dataclass(slots=True)
class _Failure:
    error: AdapterRefused
    attempts: int
    until: float


class LoadFailures:
    """What is remembered of them; instants are seconds of any clock that never goes back."""

    def __init__(self) -> None:
        self._kept: dict[str, _Failure] = {}

    def add(self, served: str, error: AdapterRefused, now: float) -> None:
        """``served`` failed: leave it for 5 s, twice as long after each further failure in a row."""
        attempts = 1
        if (last := self._kept.pop(served, None)) is not None:
            attempts += last.attempts
        self._kept[served] = _Failure(error, attempts, now + BACKOFF.delay_s(attempts))
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def standing(self, served: str, now: float) -> AdapterRefused | None:
        """Why ``served`` is not tried now, as an error of its own; ``None`` when it may be."""
        failure = self._kept.get(served)
        if failure is None or now >= failure.until:
            return None
        return AdapterRefused(failure.error.code, str(failure.error))

    def forget(self, served: str) -> None:
        """It was loaded after all."""
        self._kept.pop(served, None)

    def names(self, now: float) -> tuple[str, ...]:
        """Those that are not tried now; what failed long ago is forgotten on the way."""
        for served in [s for s, failure in self._kept.items() if now > failure.until + BACKOFF.max_s]:
            del self._kept[served]
        return tuple(served for served, failure in self._kept.items() if now < failure.until)
