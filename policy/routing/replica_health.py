"""The health of one model's replicas: circuit breakers, outlier ejection and the retry budget.

Each replica has a breaker, which only a probe closes. A replica is ejected after consecutive failures or by
the success rate of a window, for a base time multiplied by the number of ejections; at most half of the
replicas are ejected and never the last (Envoy); one that serves nothing is ejected beyond that as long as
another serves well. One probe passes at a time (linkerd). Retries are bounded by a fraction of the requests
(Finagle, linkerd).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from policy.config.deployment import OutlierEjection, RetryBudget
from policy.stats.windows import RecentCounts

# The least answers in a window for a success rate: 3 failures of 4 happen at a rate of 85 %.
MIN_VOLUME: Final = 20
# Disconnections in a window from which on a replica flaps; one or two are restarts.
FLAPS: Final = 3
# The spread of the probes of several workers that ejected a replica together.
JITTER: Final = 0.2


class CircuitBreakerState(StrEnum):
    """Of a breaker: requests pass, none pass, or one probe passes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


# Compared for each request: machine code reads a constant faster than a member of an enumeration.
_CLOSED: Final = CircuitBreakerState.CLOSED
_OPEN: Final = CircuitBreakerState.OPEN
_HALF_OPEN: Final = CircuitBreakerState.HALF_OPEN


class AttemptResult(StrEnum):
    """What an attempt says of the health of its replica.

    ``BAD`` are refused and broken connections, broken streams, silence, 5xx, and 4xx that are not the
    request's fault. ``NOTHING`` are other 4xx, errors of an adapter, refusals by the replica's admission,
    clients that left, and faults of this machine. Slow answers are not ``BAD``: they cost a replica its share
    in routing.
    """

    GOOD = "good"
    BAD = "bad"
    NOTHING = "nothing"


class CircuitBreaker:
    """The circuit breaker of one replica. ``streak`` counts its consecutive failures.

    ``reachable`` is set from outside; an unreachable replica does not count as a reason to eject another.
    ``doubted`` is set too: it has made no progress for half of the time after which it is ejected. All
    instants are seconds of one monotonic clock.
    """

    def __init__(self, limits: OutlierEjection) -> None:
        self.limits = limits
        self.state = _CLOSED
        self.reachable = True
        self.doubted = False
        self.probing = False
        self.streak = 0
        self._count = 0
        self._until = 0.0
        self._closed_at = 0.0
        self._recent = RecentCounts(limits.window_s)
        self._losses = RecentCounts(limits.window_s)

    def configure(self, limits: OutlierEjection) -> None:
        """Apply limits; a window of another length starts empty."""
        if limits.window_s != self.limits.window_s:
            self._recent, self._losses = RecentCounts(limits.window_s), RecentCounts(limits.window_s)
        self.limits = limits

    def failing(self, at: float) -> bool:
        """Whether its recent results would open it."""
        if self.streak >= self.limits.failures:
            return True
        recent = self._recent
        if not recent.second:
            return False
        recent.advance(at)
        volume = recent.first + recent.second
        return volume >= MIN_VOLUME and recent.first < self.limits.success_rate * volume

    def serves_well(self, at: float) -> bool:
        """Whether it served its last request, and in the window at least the rate that keeps it closed."""
        recent = self._recent
        if self.streak or not recent.first:
            return False
        recent.advance(at)
        return 0 < recent.first >= self.limits.success_rate * (recent.first + recent.second)

    def in_good_standing(self, at: float) -> bool:
        """Whether nothing speaks against it: it serves well, or is new."""
        if self.state is not _CLOSED or self.doubted or self.streak:
            return False
        return not self._recent.second or self.serves_well(at)

    def note(self, result: AttemptResult, at: float) -> None:
        """Take the result of an attempt."""
        if result is AttemptResult.GOOD:
            self.streak = 0
            self._recent.add(at, 1, 0)
        elif result is AttemptResult.BAD:
            self.streak += 1
            self._recent.add(at, 0, 1)

    def open(self, at: float, draw: float) -> None:
        """Eject for the base time times the count of ejections; ``draw`` in [0, 1) spreads it.

        Each closed period as long as the last ejection lowers the count by one.
        """
        base_s = self.limits.base_s
        if self.state is _CLOSED:
            well_s = at - self._closed_at
            while self._count and well_s >= base_s * self._count:
                well_s -= base_s * self._count
                self._count -= 1
        self._count += 1
        spread = 1.0 + JITTER * (draw - 0.5)
        self._until = at + min(self.limits.max_s, base_s * self._count * spread)
        self.state = _OPEN
        self.probing = False

    def due(self, at: float) -> bool:
        """Whether it is open and a probe is due."""
        return self.state is _OPEN and at >= self._until

    def half_open(self) -> None:
        """One probe may pass."""
        if self.state is _OPEN:
            self.state = _HALF_OPEN
            self.probing = False

    def take_probe(self) -> bool:
        """Claim the probe: true for one caller, until its result is reported."""
        if self.state is not _HALF_OPEN or self.probing:
            return False
        self.probing = True
        return True

    def probed(self, result: AttemptResult, at: float, draw: float) -> None:
        """Take the result of the probe; after one without a result the next may be claimed."""
        if self.state is not _HALF_OPEN or not self.probing:
            return
        self.probing = False
        if result is AttemptResult.GOOD:
            self.state = _CLOSED
            self._closed_at = at
            self._forget()
        elif result is AttemptResult.BAD:
            self.open(at, draw)

    def lost(self, at: float) -> bool:
        """The replica has become unreachable; returns whether it flaps."""
        self._losses.add(at, 1, 0)
        return self._losses.first >= FLAPS

    def reconnected(self) -> None:
        """It is reachable again: earlier failures are forgotten."""
        if self.state is _CLOSED:
            self._forget()

    def renew(self, at: float) -> None:
        """Its process was replaced: results from before are forgotten.

        It may be probed at once, unless it was ejected repeatedly.
        """
        self._forget()
        if self.state is _OPEN and self._count <= 1:
            self._until = min(self._until, at)

    def _forget(self) -> None:
        self.streak = 0
        self._recent.clear()


class ReplicaWatchdog:
    """Detects a replica that holds requests and makes no progress."""

    def __init__(self) -> None:
        self._mark: object = None
        self._since: float | None = None

    def stuck_s(self, held: int, mark: object, at: float) -> float:
        """Seconds for which it has held requests while ``mark``, a sign of progress, was the same."""
        if not held:
            self._since = None
            return 0.0
        if self._since is None or mark != self._mark:
            self._since, self._mark = at, mark
        return at - self._since


class HealthCounters:
    """Ejections by reason, retries by what came of them, and probes by result."""

    __slots__ = ("ejections", "probes", "retries")

    def __init__(self) -> None:
        self.ejections: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.probes: Counter[str] = Counter()


class ReplicaHealth:
    """The breakers of one model's replicas: how many may be open, and what is admitted when none is closed.

    Takes the results of attempts and probes, and keeps the retry budget: a fraction of the requests in a
    window, with a minimum. Instants are seconds of one monotonic clock. ``draw`` yields random numbers in
    [0, 1), which spread the probes of several workers.
    """

    def __init__(self, counters: HealthCounters, draw: Callable[[], float]) -> None:
        self.counters = counters
        self.breakers: list[CircuitBreaker] = []
        self._draw = draw
        self._eject_limits = OutlierEjection()
        self._retry_limits = RetryBudget()
        # Requests and retries.
        self._recent = RecentCounts(self._retry_limits.window_s)

    def configure(self, eject: OutlierEjection, retry: RetryBudget) -> None:
        """Apply limits; a retry budget with other limits starts empty."""
        self._eject_limits = eject
        for breaker in self.breakers:
            breaker.configure(eject)
        if retry != self._retry_limits:
            self._retry_limits = retry
            self._recent = RecentCounts(retry.window_s)

    def join(self) -> CircuitBreaker:
        """The breaker of a new replica."""
        breaker = CircuitBreaker(self._eject_limits)
        self.breakers.append(breaker)
        return breaker

    def leave(self, breaker: CircuitBreaker) -> None:
        """Remove the breaker of a replica that is gone."""
        self.breakers.remove(breaker)

    def request(self, at: float) -> None:
        """Count a new request, which adds to the retry budget."""
        self._recent.add(at, 1, 0)

    def may_retry(self, at: float) -> bool:
        """Whether the retry budget allows one more retry, which is then charged to it."""
        recent, limits = self._recent, self._retry_limits
        recent.advance(at)
        allowed = recent.second + 1 <= max(limits.at_least, limits.budget * recent.first)
        if allowed:
            recent.add(at, 0, 1)
        self.counters.retries["allowed" if allowed else "over_budget"] += 1
        return allowed

    def moved(self) -> None:
        """Count a retry that is free: it costs no replica in good standing anything."""
        self.counters.retries["free"] += 1

    def record(self, breaker: CircuitBreaker, result: AttemptResult, at: float) -> bool:
        """Take the result of an attempt; returns whether that ejected the replica."""
        breaker.note(result, at)
        return result is AttemptResult.BAD and breaker.failing(at) and self._eject(breaker, at, "failures")

    def stalled(self, breaker: CircuitBreaker, at: float) -> bool:
        """The replica holds requests and makes no progress; returns whether that ejected it."""
        return self._eject(breaker, at, "silence")

    def disconnected(self, breaker: CircuitBreaker, at: float) -> bool:
        """The replica has become unreachable; returns whether it was ejected because it flaps."""
        return breaker.lost(at) and self._eject(breaker, at, "flapping")

    def probed(self, breaker: CircuitBreaker, result: AttemptResult, at: float) -> bool:
        """Take the result of a probe; returns whether the replica is in rotation again."""
        breaker.probed(result, at, self._draw())
        self.counters.probes[result] += 1
        return breaker.state is _CLOSED

    def admits(self, breaker: CircuitBreaker) -> bool:
        """Whether a request may go there: closed, free for a probe, or no replica can serve."""
        if breaker.state is _CLOSED:
            return True
        if breaker.state is _HALF_OPEN and not breaker.probing:
            return True
        return not any(map(_serves, self.breakers))

    def all_fail(self, at: float) -> bool:
        """Whether every reachable replica is ejected, or would be."""
        return not any(_serves(breaker) and not breaker.failing(at) for breaker in self.breakers)

    def _eject(self, breaker: CircuitBreaker, at: float, reason: str) -> bool:
        """Open ``breaker`` unless too many are open, or its replica is the last that can serve.

        A replica that serves nothing may be one too many if another serves well, which then gets no load
        that was served before.
        """
        if breaker.state is not _CLOSED:
            return False
        rest = [other for other in self.breakers if other is not breaker and _serves(other)]
        if not rest:
            return False
        closed = sum(other.state is _CLOSED for other in self.breakers)
        fraction = self._eject_limits.max_fraction
        if len(self.breakers) - closed + 1 > fraction * len(self.breakers):
            serves_nothing = reason == "silence" or breaker.streak >= breaker.limits.failures
            if not (fraction and serves_nothing and any(other.serves_well(at) for other in rest)):
                return False
        breaker.open(at, self._draw())
        self.counters.ejections[reason] += 1
        return True


def _serves(breaker: CircuitBreaker) -> bool:
    return breaker.reachable and breaker.state is _CLOSED
