"""The health of one model's replicas in this worker: breakers and budget, with its dice and counters."""

from __future__ import annotations

from collections.abc import Callable

from gateway.telemetry.metrics import ModelCounters
from policy.config.deployment import Eject, Retry
from policy.routing.outlier_ejection import (
    OWN_FAULTS,
    AttemptResult,
    Breaker,
    BreakerState,
    OutlierEjection,
    RetryBudget,
)


class ReplicaHealth:
    """Where what happens to attempts and probes is told; ``at`` is loop time everywhere."""

    def __init__(self, meter: ModelCounters, draw: Callable[[], float]) -> None:
        self.ejections = OutlierEjection(Eject())
        self._budget = RetryBudget(Retry())
        self._meter = meter
        self._draw = draw

    def follow(self, eject: Eject, retry: Retry) -> None:
        """Other limits from now on; a budget of other limits begins anew."""
        self.ejections.follow(eject)
        if retry != self._budget.limits:
            self._budget = RetryBudget(retry)

    def request(self, at: float) -> None:
        """A new request came: it is worth a part of a retry."""
        self._budget.request(at)

    def may_retry(self, at: float) -> bool:
        """Whether the budget has one more; it is spent if so."""
        allowed = self._budget.take(at)
        self._meter.retries["allowed" if allowed else "over_budget"] += 1
        return allowed

    def moved(self) -> None:
        """A request goes elsewhere that cost no replica in good standing anything."""
        self._meter.retries["free"] += 1

    def tell(self, breaker: Breaker, sign: AttemptResult, at: float) -> bool:
        """What an attempt said of a replica; whether that ejected it."""
        if not self.ejections.note(breaker, sign, at, self._draw() if sign is AttemptResult.BAD else 0.0):
            return False
        self._meter.ejections["failures"] += 1
        return True

    def silent(self, breaker: Breaker, at: float) -> bool:
        """It holds requests and moves none; whether that ejected it."""
        if not self.ejections.eject(breaker, at, self._draw()):
            return False
        self._meter.ejections["silence"] += 1
        return True

    def lost(self, breaker: Breaker, at: float) -> None:
        """It cannot be heard any more: who comes and goes is kept out for a while."""
        if self.ejections.lost(breaker, at, self._draw()):
            self._meter.ejections["flapping"] += 1

    def probed(self, breaker: Breaker, sign: AttemptResult, at: float) -> bool:
        """How a probe went; whether the replica is in rotation again."""
        breaker.probed(sign, at, self._draw())
        self._meter.probes[sign] += 1
        return breaker.state is BreakerState.CLOSED

    def all_fail(self, at: float) -> bool:
        """Whether no replica that can be reached is in good standing."""
        return self.ejections.all_fail(at)


def is_own_fault(error: BaseException | None) -> bool:
    """Whether the root of ``error`` is that this machine has no more of something."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in OWN_FAULTS:
            return True
        error = error.__cause__ or error.__context__
    return False
