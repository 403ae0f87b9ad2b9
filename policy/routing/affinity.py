"""Homes for prefixes and adapters: who is believed to hold what, and how even the load must stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

# Shares are of the requests since about the last 512 to 1024 that each replica had: fewer, and chance
# alone (1/sqrt) exceeds the bound that is to be held.
WINDOW = 1024.0

# Prices are in units of one cold prefill (or load) of the kind at hand, loads in units of the mean.
LEAN = 0.25  # for each whole mean load, so that equals are kept even

LEAN_NEW = 8.0  # the same for what has no home yet: a wrong one costs another prefill later

PRICE = 4.5  # beyond the edge: worth leaving a warm home, the wait that it makes for others, and a copy

# Beyond this excess over the mean a share has more than it should: what is always left, the deviation
# that chance makes of so many requests, and what the first prefixes to come may still even out.
SLACK = 0.03

CHANCE = 1.0

FIRST = 16.0

# How many edges beyond the mean anything leaves that can, the cure or not.
FLIGHT = 2.5

# Caches are kept even as well, since a router seldom knows their size: what a replica with so many times
# the mean number of homes pays for a new one, and for a copy that evens the load, and the price of each
# further mean. One home more than that is always free.
CROWDED, CROWDED_BY_COPIES, CROWD_PRICE = 1.0, 1.2, 32.0

# What is cached twice takes the room of another prefix: one prefill of it more, while there is room for all
# homes. Where there is not, something is evicted whatever goes where.
COPY = 1.0

# What a home is credited with, in requests, and how often that is reckoned.
LEAST_WORTH, MOST_WORTH, WORTH_EVERY = 0.5, 16.0, 16

_MASK = 0xFFFF_FFFF_FFFF_FFFF

_UNIT = 1.0 / 2.0**64


class Popularity:
    """How often each of many keys was asked for lately, of a bounded number of keys.

    Two generations: the younger counts, the older remembers; when the younger has seen ``span``
    requests it becomes the older.
    """

    __slots__ = ("_old", "_seen", "_span", "_squares", "_young", "worth")

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
        """The fraction of the last requests that were for ``key``."""
        seen = self._seen + (self._span if self._old else 0)
        return self.of(key) / seen if seen else 0.0

    def add(self, key: int) -> None:
        """One more request for ``key``.

        ``worth`` follows: the requests that a key is given credit for beside those that it had. If their
        rates are spread like a gamma distribution, that is its shape, mean^2 / (variance - mean) of the
        counts: many where all are alike, a fraction where few have most.
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


class Slots:
    """The adapters that one replica is believed to have loaded: the last ``count`` that were used.

    Where it tells what it has loaded, that is believed, with what it was asked for since and is yet to tell:
    which one went for that it says itself, and it need not be the one that was used longest ago.
    """

    __slots__ = ("_asked", "_resident", "_tells", "count")

    def __init__(self, count: int) -> None:
        self.count = count
        self._resident: dict[int, None] = {}
        self._asked: dict[int, None] = {}
        self._tells = False

    def __contains__(self, adapter: int) -> bool:
        return adapter in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    def oldest(self, count: int) -> list[int]:
        """Up to ``count`` of those that were used longest ago."""
        return list(islice(self._resident, count))

    def loaded(self, adapter: int) -> bool:
        """Whether it is there by all that is known, and not only asked for."""
        return adapter in self._resident and adapter not in self._asked

    def use(self, adapter: int) -> bool:
        """``adapter`` is used there now; whether it had to be loaded."""
        resident = self._resident
        loaded = adapter not in resident
        if loaded:
            self._asked[adapter] = None
        else:
            del resident[adapter]
        resident[adapter] = None
        self._shed()
        return loaded

    def came(self, adapter: int) -> None:
        """A request that waited for it had its first token."""
        self._asked.pop(adapter, None)

    def told(self, loaded: Sequence[int], refused: Sequence[int]) -> None:
        """The replica says what it has ``loaded``, and what it could not load lately."""
        self._tells = True
        listed = set(loaded)
        asked = self._asked
        for adapter in (*loaded, *refused):
            asked.pop(adapter, None)
        # What others asked it for is, as far as anybody here knows, the first to go.
        resident = {adapter: None for adapter in loaded if adapter not in self._resident}
        for adapter in self._resident:
            if adapter in listed or adapter in asked:
                resident[adapter] = None
        self._resident = resident
        self._shed()

    def _shed(self) -> None:
        resident, asked = self._resident, self._asked
        if self._tells:
            # Of requests that failed nobody hears whether their adapters were loaded.
            while len(asked) > self.count:
                out = next(iter(asked))
                del asked[out]
                resident.pop(out, None)
            return
        while len(resident) > self.count:
            out = next(iter(resident))
            del resident[out]
            asked.pop(out, None)


class Share:
    """The requests that one replica began lately, and the prefixes that made their home there.

    ``due`` is both together for a weight of 1, as of the last balance. ``takers`` are the shares of
    replicas that what had its home here got another at, with how much of the mean load that brings.
    """

    __slots__ = ("due", "homes", "load", "seen", "takers", "weight")

    def __init__(self) -> None:
        self.seen = -1
        self.load = 0.0
        self.homes = 0.0
        self.due = 0.0
        self.takers: list[tuple[Share, float]] = []
        self.weight = 1.0

    def take(self, begun: int) -> None:
        """The counter of requests begun there says ``begun``; one that went back began anew."""
        if begun > self.seen >= 0:
            self.load += begun - self.seen
        self.seen = begun


class Recent:
    """What was last put under each of many keys, for the most recent half of ``bound`` keys at least."""

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, bound: int) -> None:
        self._half = bound // 2
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: int) -> int | None:
        """The value of ``key``, if it is remembered."""
        value = self._young.get(key)
        return self._old.get(key) if value is None else value

    def put(self, key: int, value: int) -> None:
        """Remember ``value``."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = value


class Balance(NamedTuple):
    """The shares of all candidates together.

    ``load`` is the mean for a weight of 1, ``least`` the least that is due anywhere, ``unit`` what a home
    costs for each request that more than that is due, ``homes`` the mean of those for a weight of 1.
    """

    load: float
    least: float
    unit: float
    homes: float

    def share_price(self, share: Share, leverage: float) -> float:
        """What one more request costs a replica with ``share``; ``leverage`` is what its kind brings.

        Nothing much below the bound. Above it a warm home becomes dearer than a cold prefill elsewhere,
        for what brings enough traffic that moving a part of it is the whole cure: ``leverage`` is in
        units of the mean load, as the excess is. While a cure is under way, no other is begun.
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
        relief = sum(part for taker, part in share.takers if taker.load < least)
        if relief >= over or leverage < over:
            return LEAN * over + PRICE * max(0.0, over / edge - FLIGHT)
        return LEAN * over + PRICE


def crowd_price(share: Share, homes: float, free: float) -> float:
    """What one prefix more costs a cache with the homes of ``share``, where ``homes`` are the mean.

    Nothing below ``free`` times the mean.
    """
    over = (share.homes - 1.0) / homes - free if homes > 0.0 else 0.0
    return CROWD_PRICE * over if over > 0.0 else 0.0


def balance_of(shares: Sequence[Share], worth: float = 1.0) -> Balance:
    """The balance of ``shares``, a home being worth so many requests.

    All are halved together once their mean load exceeds the window.
    """
    total = weights = homes = 0.0
    least = math.inf
    for share in shares:
        total += share.load
        homes += share.homes
        weight = share.weight
        weights += weight
        share.due = due = (share.load + worth * share.homes) / weight
        if due < least:  # noqa: PLR1730 - min() costs a router as much as all else in this loop
            least = due
    if total > WINDOW * len(shares):
        for share in shares:
            share.load *= 0.5
            share.homes *= 0.5
        return balance_of(shares, worth)
    fair = (total + worth * homes) / weights
    return Balance(total / weights, least, LEAN_NEW / fair if fair > 0.0 else 0.0, homes / weights)
