"""Cache affinity: prefers replicas that hold a prompt's prefix or its adapter, and keeps the load even.

The home of a prefix is the replica that cached it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Final

# Shares cover the last 512 to 1024 requests of each replica: of fewer, chance (1/sqrt) exceeds the bound.
WINDOW: Final = 1024.0
# Prices are in cold prefills (or loads), excess loads in units of the mean load.
LEAN: Final = 0.25  # per mean load, so that equal replicas stay even
LEAN_NEW: Final = 8.0  # the same for a prefix without a home: a wrong one costs another prefill later
PRICE: Final = (
    4.5  # beyond the edge: enough to leave a warm home in spite of the prefill, its wait and the copy
)
# The edge, the excess over the mean from which a share is too large: a fixed part, the deviation by chance,
# and what the next prefixes may still even out.
SLACK: Final = 0.03
CHANCE: Final = 0.8
FIRST: Final = 8.0
# A prefix helps if its traffic is at least this part of the excess.
HELPS: Final = 0.7
# Beyond this many edges, requests leave even if others are already being moved.
FLIGHT: Final = 2.5
# Caches are kept even too, since their size is often unknown: the multiple of the mean number of homes from
# which a new home, or a copy that evens the load, has a price, and the price per further mean.
CROWDED: Final = 1.0
CROWDED_BY_COPIES: Final = 1.2
CROWD_PRICE: Final = 32.0
# The price of a copy, in prefills: it takes the room of another prefix, while all homes still fit.
COPY: Final = 1.0
# Bounds of a home's worth in requests, and the interval of its computation.
LEAST_WORTH: Final = 0.5
MOST_WORTH: Final = 16.0
WORTH_EVERY: Final = 16


class PopularityCounter:
    """Recent request counts of a bounded number of keys.

    There are two generations: after ``span`` requests the younger becomes the older.
    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._seen = self._squares = 0
        self.worth = MOST_WORTH

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def of(self, key: int) -> int:
        """Requests for ``key`` among the last one to two spans."""
        return self._young.get(key, 0) + self._old.get(key, 0)

    def share(self, key: int) -> float:
        seen = self._seen + (self._span if self._old else 0)
        return self.of(key) / seen if seen else 0.0

    def add(self, key: int) -> None:
        """Count a request for ``key``.

        ``worth``, the requests credited to a key on top of its count, is the shape of a gamma distribution of
        the rates: mean^2 / (variance - mean) of the counts; high for equal keys, low for skewed ones.
        """
        if self._seen >= self._span:
            self._old, self._young, self._seen, self._squares = self._young, {}, 0, 0
        count = self._young.get(key, 0)
        self._young[key] = count + 1
        self._seen += 1
        self._squares += 2 * count + 1
        if not self._seen % WORTH_EVERY:
            mean = self._seen / len(self._young)
            excess = self._squares / len(self._young) - mean * mean - mean
            shape = mean * mean / excess if excess > 0.0 else MOST_WORTH
            self.worth = max(LEAST_WORTH, min(MOST_WORTH, shape))


class AssumedAdapterSlots:
    """The adapters assumed loaded on one replica: the last ``count`` used.

    A replica that reports its adapters has those, and the ones requested since the report.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._resident: dict[int, None] = {}
        self._asked: dict[int, None] = {}
        self._reports = False

    def __contains__(self, adapter: int) -> bool:
        return adapter in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def oldest(self, count: int) -> list[int]:
        return list(islice(self._resident, count))

    def loaded(self, adapter: int) -> bool:
        """Whether it is loaded, and not only requested."""
        return adapter in self._resident and adapter not in self._asked

    def use(self, adapter: int) -> bool:
        """Use ``adapter``; returns whether it had to be loaded."""
        resident = self._resident
        loaded = adapter not in resident
        if loaded:
            self._asked[adapter] = None
        else:
            del resident[adapter]
        resident[adapter] = None
        self._shed()
        return loaded

    def confirm(self, adapter: int) -> None:
        """A request that waited for the load had its first token."""
        self._asked.pop(adapter, None)

    def report(self, loaded: Sequence[int], refused: Sequence[int]) -> None:
        """Take the replica's report of ``loaded`` adapters, and of those that it failed to load."""
        self._reports = True
        listed = set(loaded)
        asked = self._asked
        for adapter in (*loaded, *refused):
            asked.pop(adapter, None)
        # Adapters that other workers requested count as the least recently used.
        resident = {adapter: None for adapter in loaded if adapter not in self._resident}
        for adapter in self._resident:
            if adapter in listed or adapter in asked:
                resident[adapter] = None
        self._resident = resident
        self._shed()

    def _shed(self) -> None:
        # Of a replica that reports, only the requested adapters are assumed: failed requests do not show
        # whether theirs were loaded.
        bounded, other = self._resident, self._asked
        if self._reports:
            bounded, other = other, bounded
        while len(bounded) > self.count:
            oldest = next(iter(bounded))
            del bounded[oldest]
            other.pop(oldest, None)


class ReplicaShare:
    """The recent load of one replica in requests, and the number of its homes.

    ``due`` is both together per weight, as of the last balance. ``takers`` are the shares of replicas that
    got copies of prefixes from here, with the part of the mean load that each can take, and the mean load by
    which that would have evened the load.
    """

    __slots__ = ("due", "homes", "load", "seen", "takers", "weight")

    def __init__(self) -> None:
        self.seen = -1
        self.load = 0.0
        self.homes = 0.0
        self.due = 0.0
        self.takers: list[tuple[ReplicaShare, float, float]] = []
        self.weight = 1.0

    def take(self, begun: int) -> None:
        """Update from the counter of requests begun; a lower value is a restart."""
        if begun > self.seen >= 0:
            self.load += begun - self.seen
        self.seen = begun


class ShareSums:
    """The sums over the shares of the replicas that are present, while one after the other may change.

    ``ready``: :meth:`start` was called. The sums are those in the order of the replicas: in any other they
    would be rounded otherwise, and decide otherwise between equal replicas.
    """

    __slots__ = ("_end", "_homes", "_loads", "_places", "_stale", "_sums", "_weights", "ready")

    def __init__(self) -> None:
        self.ready = self._stale = False
        self._places: dict[ReplicaShare, int] = {}
        # By place, 0 for one that is not present; the last that is has the place before the end.
        self._loads: list[float] = []
        self._homes: list[float] = []
        self._weights: list[float] = []
        self._end = 0
        self._sums = (0.0, 0.0, 0.0)

    def start(self, shares: Sequence[tuple[ReplicaShare, bool]]) -> None:
        """Begin with the ``shares`` of all replicas in order, and whether each is present."""
        self.ready, self._stale = True, False
        self._places = {share: place for place, (share, _) in enumerate(shares)}
        self._loads, self._homes, self._weights = ([0.0] * len(shares) for _ in range(3))
        self._end, self._sums = 0, (0.0, 0.0, 0.0)
        for share, present in shares:
            if present:
                self.put(share)

    def put(self, share: ReplicaShare) -> None:
        """``share`` is present, is new or may have changed."""
        place = self._places.setdefault(share, len(self._places))
        if place == len(self._loads):
            for values in (self._loads, self._homes, self._weights):
                values.append(0.0)
        elif (
            self._loads[place] == share.load
            and self._homes[place] == share.homes
            and self._weights[place] == share.weight
        ):
            return
        self._loads[place], self._homes[place], self._weights[place] = share.load, share.homes, share.weight
        if place < self._end:
            self._stale = True
        else:  # the common case, where all were absent
            load, homes, weight = self._sums
            self._sums = load + share.load, homes + share.homes, weight + share.weight
            self._end = place + 1

    def level(self, share: ReplicaShare) -> None:
        """Lift ``share``, which is not present yet, to the mean of those that are."""
        if self._stale:
            self._sums = sum(self._loads), sum(self._homes), sum(self._weights)
            self._stale = False
        load, homes, weight = self._sums
        if weight:
            part = share.weight / weight
            share.load = max(share.load, part * load)
            share.homes = max(share.homes, part * homes)


def mean_load(shares: Sequence[ReplicaShare]) -> float:
    """The load of ``shares`` together per weight."""
    return math.fsum(share.load for share in shares) / math.fsum(share.weight for share in shares)


def add_taker(share: ReplicaShare, taker: ReplicaShare, part: float, mean: float) -> None:
    """``taker`` got a copy of a prefix that makes up ``part`` of the ``mean`` load.

    Once it had the time to even the load, it relieves no further: its prefix may have moved as a whole.
    """
    until = mean + (share.load / share.weight - mean) / part if part else mean
    share.takers = [*share.takers[-3:], (taker, part, until)]


class ShareAverages:
    """The shares of all candidates together.

    ``load`` and ``homes`` are means for a weight of 1, ``least`` is the lowest ``due`` of a share, ``unit``
    the price of a new home per request above that.
    """

    # Written out, because named tuples are not compiled.
    __slots__ = ("homes", "least", "load", "unit")

    def __init__(self, load: float, least: float, unit: float, homes: float) -> None:
        self.load = load
        self.least = least
        self.unit = unit
        self.homes = homes

    def share_price(self, share: ReplicaShare, leverage: float) -> float:
        """The price of one more request at a replica with ``share``.

        It is small below the edge. Above it, a warm home becomes dearer than a cold prefill elsewhere for a
        prefix whose traffic (``leverage``, in mean loads) helps against the excess, unless the takers of
        earlier copies already cover it.
        """
        fair = share.weight * self.load
        if fair <= 0.0:
            return 0.0
        over = share.load / fair - 1.0
        if over <= SLACK:
            return LEAN * over
        edge = SLACK + CHANCE / math.sqrt(fair) + FIRST / fair
        if over <= edge:
            return LEAN * over
        least = share.load * (1.0 - 0.5 * edge)
        relief = sum(part for taker, part, until in share.takers if taker.load < least and self.load < until)
        if relief >= over or leverage < HELPS * over:
            return LEAN * over + PRICE * max(0.0, over / edge - FLIGHT)
        return LEAN * over + PRICE


def crowd_price(share: ReplicaShare, homes: float, free: float) -> float:
    """The price of one more home in the cache of ``share``; 0 below ``free`` times the mean ``homes``."""
    over = (share.homes - 1.0) / homes - free if homes > 0.0 else 0.0
    return CROWD_PRICE * over if over > 0.0 else 0.0


def balance_of(shares: Sequence[ReplicaShare], worth: float = 1.0) -> ShareAverages:
    """The balance of ``shares``, with ``worth`` requests per home.

    All shares are halved once their mean load exceeds the window.
    """
    total = weights = homes = 0.0
    least = math.inf
    for share in shares:
        total += share.load
        homes += share.homes
        weight = share.weight
        weights += weight
        share.due = due = (share.load + worth * share.homes) / weight
        if due < least:  # noqa: PLR1730 - min() is as slow as the rest of this loop
            least = due
    if total > WINDOW * len(shares):
        for share in shares:
            share.load *= 0.5
            share.homes *= 0.5
            share.takers = [(taker, part, 0.5 * until) for taker, part, until in share.takers]
        return balance_of(shares, worth)
    fair = (total + worth * homes) / weights
    return ShareAverages(total / weights, least, LEAN_NEW / fair if fair > 0.0 else 0.0, homes / weights)
