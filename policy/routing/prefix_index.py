"""Which replica is believed to hold which prompt prefixes in its KV cache: bounded, and ageing."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Two hashes a prompt of a few KiB has in a replica's memory for each 512 tokens or so: 16,384 stand for
# several times the KV cache of any one card, in about 2 MiB.
CAPACITY = 16_384
AGE_S = 1800.0
# One late first token is an accident, twenty are an evicted prefix.
SHRINKAGE = 0.95
GROWTH = 1.005
DOUBT = 3.0
FORGIVEN = 0.9


class PrefixIndex:
    """The prefixes of one replica, as hashes of growing depth of which each implies those before it.

    Two generations stand in for a list in the order of use: what was used since the last turn is in the
    younger, and the older is dropped whole. So the bound is strict, what was used among the last half
    of it is always there, and what was not for ``age_s`` seconds never is.

    Beside each hash stands how many uncached tokens the replica had been given when it was last used:
    once its whole KV capacity came after, an engine has evicted it. ``capacity`` is that in tokens, as the
    replica said; first tokens that came late, or did not, correct it or stand in for it. ``young`` and
    ``old`` are the generations, of which the next turn is due ``turn_s`` after ``turned_at``: a router
    looks into them before it asks, for most replicas hold nothing of most prompts.
    """

    __slots__ = ("_age_s", "_doubt", "_half", "capacity", "given", "old", "turn_s", "turned_at", "young")

    def __init__(self, capacity: int = CAPACITY, age_s: float = AGE_S) -> None:
        self._half = capacity // 2
        self._age_s = age_s
        self.turn_s = age_s / 2
        self.young: dict[int, int] = {}
        self.old: dict[int, int] = {}
        self.turned_at = 0.0
        self.given = 0
        self.capacity = math.inf
        self._doubt = 0.0

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    def __contains__(self, key: int) -> bool:
        return key in self.young or key in self.old

    def age(self, key: int) -> int:
        """The uncached tokens that were given since ``key`` was last used, which is known."""
        stamp = self.young.get(key)
        return self.given - (self.old[key] if stamp is None else stamp)

    def survived(self, age: int) -> None:
        """What was ``age`` tokens old was still cached."""
        self._doubt *= FORGIVEN
        if self.capacity < math.inf:
            self.capacity = max(self.capacity * GROWTH, age)

    def was_gone(self, age: int) -> None:
        """What was ``age`` tokens old was not cached any more, as far as can be seen."""
        self._doubt += 1.0
        if self._doubt < DOUBT:
            return
        self.capacity = SHRINKAGE * max(age, min(self.capacity, self.given))

    def depth(self, hashes: Sequence[int], at: float) -> int:
        """How many of ``hashes`` are believed cached, counted from the start.

        A deeper hash is never believed without
        those before it, so halving finds the deepest.
        """
        if at - self.turned_at > self.turn_s:
            self._turn(at)
        young, old = self.young, self.old
        if not hashes or (hashes[0] not in young and hashes[0] not in old):
            return 0
        floor = self.given - self.capacity
        low, high = 0, len(hashes)
        # Most are a known beginning and a tail of their own.
        for last in (high - 1, high - 2):
            stamp = young.get(hashes[last])
            if stamp is None:
                stamp = old.get(hashes[last], -1)
            if stamp >= 0 and stamp >= floor:
                return last + 1
            high = last
            if not high:
                return 0
        while low < high:
            middle = (low + high) // 2
            stamp = young.get(hashes[middle])
            if stamp is None:
                stamp = old.get(hashes[middle], -1)
            if stamp >= 0 and stamp >= floor:
                low = middle + 1
            else:
                high = middle
        return low

    def touch(self, hashes: Sequence[int], tokens: int, at: float) -> None:
        """A prompt with these ``hashes`` was sent there, ``tokens`` of it not cached yet."""
        self.given += tokens
        if len(self.young) + len(hashes) > self._half or at - self.turned_at > self.turn_s:
            self._turn(at)
        stamp = self.given
        young = self.young
        for key in hashes[: self._half]:
            young[key] = stamp

    def _turn(self, at: float) -> None:
        self.old = {} if at - self.turned_at > self._age_s else self.young
        self.young = {}
        self.turned_at = at
