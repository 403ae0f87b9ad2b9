"""Which replicas are trusted with requests, and how often a request may be tried again.

A breaker for each replica opens by itself and is closed by a probe alone. What trusted proxies use:
ejection after a row of failures or by the success rate of a window, for a base time times the count of
ejections, of at most half of the replicas and never the last (Envoy); one state machine with a single
probe (linkerd); retries bounded by a share of the requests (Finagle, linkerd).
"""

from __future__ import annotations

from enum import StrEnum

from policy.config.deployment import Eject, Retry
from policy.stats.windows import RecentCounts

# Fewer answers in a window say nothing of a rate: 3 failures of 4 happen to a replica of 85 %.
MIN_VOLUME = 20
# A process that goes away once was restarted or moved; one that does so thrice in a window flaps.
FLAPS = 3
# Workers that ejected a replica together do not probe it together.
JITTER = 0.2


class BreakerState(StrEnum):
    """Of a breaker: requests pass, none do, or one does."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class AttemptResult(StrEnum):
    """What an attempt says of its replica.

    ``BAD`` are refused and broken connections, broken streams, silence and 5xx. ``NOTHING`` are 4xx,
    errors of an adapter, what a replica refuses by its own rules, clients that left, and faults of
    this machine. That an answer was slow is no sign: slowness costs a replica its share in routing.
    """

    GOOD = "good"
    BAD = "bad"
    NOTHING = "nothing"


class Breaker:
    """Whether one replica is trusted. ``streak`` are its failures in a row.

    ``reachable`` is whether the replica can be heard at all, which others decide; a replica that
    cannot be is no reason to keep another. All instants are seconds of one monotonic clock.
    """

    __slots__ = (
        "_closed_at",
        "_count",
        "_losses",
        "_recent",
        "_until",
        "limits",
        "probing",
        "reachable",
        "state",
        "streak",
    )

    def __init__(self, limits: Eject) -> None:
        self.limits = limits
        self.state = BreakerState.CLOSED
        self.reachable = True
        self.probing = False
        self.streak = 0
        self._count = 0
        self._until = 0.0
        self._closed_at = 0.0
        self._recent = RecentCounts(limits.window_s)
        self._losses = RecentCounts(limits.window_s)

    def failing(self, at: float) -> bool:
        """Whether what it did lately would open it."""
        if self.streak >= self.limits.failures:
            return True
        recent = self._recent
        if not recent.second:
            return False
        recent.advance(at)
        volume = recent.first + recent.second
        return volume >= MIN_VOLUME and recent.first < self.limits.success_rate * volume

    def note(self, sign: AttemptResult, at: float) -> None:
        """Take an attempt's sign."""
        if sign is AttemptResult.GOOD:
            self.streak = 0
            self._recent.add(at, 1, 0)
        elif sign is AttemptResult.BAD:
            self.streak += 1
            self._recent.add(at, 0, 1)

    def open(self, at: float, draw: float) -> None:
        """No requests for the base time times the count of ejections; ``draw`` in [0, 1) spreads it.

        A closed time as long as the last open one takes one from the count: who flaps is out for longer
        each time, who was well is forgiven.
        """
        base_s = self.limits.base_s
        if self.state is BreakerState.CLOSED:
            well_s = at - self._closed_at
            while self._count and well_s >= base_s * self._count:
                well_s -= base_s * self._count
                self._count -= 1
        self._count += 1
        spread = 1.0 + JITTER * (draw - 0.5)
        self._until = at + min(self.limits.max_s, base_s * self._count * spread)
        self.state = BreakerState.OPEN
        self.probing = False

    def due(self, at: float) -> bool:
        """Whether it is open and may be probed."""
        return self.state is BreakerState.OPEN and at >= self._until

    def half_open(self) -> None:
        """One probe may pass."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
            self.probing = False

    def take_probe(self) -> bool:
        """Become the probe: true for one caller, until it says how that went."""
        if self.state is not BreakerState.HALF_OPEN or self.probing:
            return False
        self.probing = True
        return True

    def probed(self, sign: AttemptResult, at: float, draw: float) -> None:
        """How the probe went; one that says nothing leaves its place to the next."""
        if self.state is not BreakerState.HALF_OPEN or not self.probing:
            return
        self.probing = False
        if sign is AttemptResult.GOOD:
            self.state = BreakerState.CLOSED
            self._closed_at = at
            self._forget()
        elif sign is AttemptResult.BAD:
            self.open(at, draw)

    def lost(self, at: float) -> bool:
        """The replica cannot be heard any more; whether that has become a habit."""
        self._losses.add(at, 1, 0)
        return self._losses.first >= FLAPS

    def heard(self) -> None:
        """It can be heard again: what failed while it went away says nothing of what came back."""
        if self.state is BreakerState.CLOSED:
            self._forget()

    def renew(self, at: float) -> None:
        """The process behind it is a new one: what the old one did counts no more.

        It may be probed at once, unless it was out before and its processes come and go.
        """
        self._forget()
        if self.state is BreakerState.OPEN and self._count <= 1:
            self._until = min(self._until, at)

    def _forget(self) -> None:
        self.streak = 0
        self._recent.clear()


class OutlierEjection:
    """The breakers of one model: how many may be open, and what passes when none is closed."""

    __slots__ = ("breakers", "limits")

    def __init__(self, limits: Eject) -> None:
        self.limits = limits
        self.breakers: list[Breaker] = []

    def follow(self, limits: Eject) -> None:
        """Other limits from now on."""
        self.limits = limits
        for breaker in self.breakers:
            breaker.limits = limits

    def join(self) -> Breaker:
        """The breaker of a new replica."""
        breaker = Breaker(self.limits)
        self.breakers.append(breaker)
        return breaker

    def leave(self, breaker: Breaker) -> None:
        """Its replica is gone."""
        self.breakers.remove(breaker)

    @property
    def ejected(self) -> int:
        """How many breakers are not closed."""
        return sum(breaker.state is not BreakerState.CLOSED for breaker in self.breakers)

    def note(self, breaker: Breaker, sign: AttemptResult, at: float, draw: float) -> bool:
        """Take an attempt's sign; whether that ejected its replica."""
        breaker.note(sign, at)
        return sign is AttemptResult.BAD and breaker.failing(at) and self.eject(breaker, at, draw)

    def lost(self, breaker: Breaker, at: float, draw: float) -> bool:
        """Its replica cannot be heard any more; whether that ejected it, for it was so too often."""
        return breaker.lost(at) and self.eject(breaker, at, draw)

    def eject(self, breaker: Breaker, at: float, draw: float) -> bool:
        """Open ``breaker`` unless too many are, or it is the last that can serve."""
        if breaker.state is not BreakerState.CLOSED:
            return False
        if self.ejected + 1 > self.limits.max_fraction * len(self.breakers):
            return False
        if not any(other is not breaker and _serves(other) for other in self.breakers):
            return False
        breaker.open(at, draw)
        return True

    def admits(self, breaker: Breaker) -> bool:
        """Whether a request may go there: closed, or the probe, or anyone where nothing else is left."""
        if breaker.state is BreakerState.CLOSED:
            return True
        if breaker.state is BreakerState.HALF_OPEN and not breaker.probing:
            return True
        return not any(map(_serves, self.breakers))

    def all_fail(self, at: float) -> bool:
        """Whether every replica that can be reached is out, or would be."""
        return not any(_serves(breaker) and not breaker.failing(at) for breaker in self.breakers)


def _serves(breaker: Breaker) -> bool:
    return breaker.reachable and breaker.state is BreakerState.CLOSED


class RetryBudget:
    """Retries of one model: a share of the requests in a window, and at least a few."""

    __slots__ = ("_recent", "limits")

    def __init__(self, limits: Retry) -> None:
        self.limits = limits
        self._recent = RecentCounts(limits.window_s)

    def request(self, at: float) -> None:
        """A new request came."""
        self._recent.add(at, 1, 0)

    def take(self, at: float) -> bool:
        """Whether one more retry fits; it is counted if so."""
        recent = self._recent
        recent.advance(at)
        if recent.second + 1 > max(self.limits.at_least, self.limits.budget * recent.first):
            return False
        recent.add(at, 0, 1)
        return True


class Watchdog:
    """Finds a replica that holds requests and moves none of them."""

    __slots__ = ("_mark", "_since")

    def __init__(self) -> None:
        self._mark: object = None
        self._since: float | None = None

    def stuck_s(self, held: int, mark: object, at: float) -> float:
        """Seconds for which it has held requests while ``mark``, which changes with progress, stood still."""
        if not held:
            self._since = None
            return 0.0
        if self._since is None or mark != self._mark:
            self._since, self._mark = at, mark
        return at - self._since
