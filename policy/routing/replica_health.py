"""The health of one model's replicas in one gateway worker: outlier ejection and the retry budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from policy.config.deployment import Eject, Retry
from policy.routing.outlier_ejection import (
    AttemptResult,
    Breaker,
    BreakerState,
    OutlierEjection,
    RetryBudget,
)


class HealthCounters:
    """Ejections by reason, retries by what came of them, and probes by result."""

    __slots__ = ("ejections", "probes", "retries")

    def __init__(self) -> None:
        self.ejections: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.probes: Counter[str] = Counter()


class ReplicaHealth:
    """Takes the results of attempts and probes.

    Instants are seconds of one monotonic clock. ``draw`` yields random numbers in [0, 1), which spread the
    probes of several workers.
    """

    def __init__(self, counters: HealthCounters, draw: Callable[[], float]) -> None:
        self.ejections = OutlierEjection(Eject())
        self.counters = counters
        self._budget = RetryBudget(Retry())
        self._draw = draw

    def configure(self, eject: Eject, retry: Retry) -> None:
        """Apply limits; a retry budget with other limits starts empty."""
        self.ejections.follow(eject)
        if retry != self._budget.limits:
            self._budget = RetryBudget(retry)

    def request(self, at: float) -> None:
        """Count a new request, which adds to the retry budget."""
        self._budget.request(at)

    def may_retry(self, at: float) -> bool:
        """Whether the retry budget allows one more retry, which is then charged to it."""
        allowed = self._budget.take(at)
        self.counters.retries["allowed" if allowed else "over_budget"] += 1
        return allowed

    def moved(self) -> None:
        """Count a retry that is free: it costs no replica in good standing anything."""
        self.counters.retries["free"] += 1

    def record(self, breaker: Breaker, result: AttemptResult, at: float) -> bool:
        """Take the result of an attempt; returns whether that ejected the replica."""
        draw = self._draw() if result is AttemptResult.BAD else 0.0
        if not self.ejections.note(breaker, result, at, draw):
            return False
        self.counters.ejections["failures"] += 1
        return True

    def stalled(self, breaker: Breaker, at: float) -> bool:
        """The replica holds requests and makes no progress; returns whether that ejected it."""
        if not self.ejections.eject(breaker, at, self._draw()):
            return False
        self.counters.ejections["silence"] += 1
        return True

    def disconnected(self, breaker: Breaker, at: float) -> None:
        """The replica has become unreachable; one that flaps is ejected."""
        if self.ejections.lost(breaker, at, self._draw()):
            self.counters.ejections["flapping"] += 1

    def probed(self, breaker: Breaker, result: AttemptResult, at: float) -> bool:
        """Take the result of a probe; returns whether the replica is in rotation again."""
        breaker.probed(result, at, self._draw())
        self.counters.probes[result] += 1
        return breaker.state is BreakerState.CLOSED

    def all_fail(self, at: float) -> bool:
        """Whether no reachable replica is in good standing."""
        return self.ejections.all_fail(at)
