"""The prompt prefixes assumed to be in one replica's KV cache: bounded, and ageing."""

from __future__ import annotations

import math
from collections.abc import Sequence

# About one hash per 256 tokens: 16,384 cover several times the KV cache of any GPU, in about 2 MiB.
CAPACITY = 16_384
AGE_S = 1800.0
# A single late first token does not shrink the capacity, DOUBT of them do.
SHRINKAGE = 0.95
GROWTH = 1.005
DOUBT = 3.0
FORGIVEN = 0.9


class PrefixIndex:
    """The prefixes of one replica, as hashes of growing depth, each of which implies those before it.

    The generations ``young`` and ``old`` approximate an LRU list: the older is dropped whole at a turn, due
    ``turn_s`` after ``turned_at``. The bound is strict, the most recent half of it is always kept, and
    entries unused for ``age_s`` seconds are gone.

    Each hash maps to ``given``, the uncached tokens sent to the replica so far, at its last use: after
    ``capacity`` further tokens the engine has evicted it. The capacity in tokens is as reported, and
    corrected by first tokens. The router reads the generations directly, since most replicas hold nothing of
    a prompt.
    """

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
        """The uncached tokens sent since the last use of ``key``, which must be present."""
        stamp = self.young.get(key)
        return self.given - (self.old[key] if stamp is None else stamp)

    def survived(self, age: int) -> None:
        """An entry of this ``age`` (tokens) was still cached."""
        self._doubt *= FORGIVEN
        if self.capacity < math.inf:
            self.capacity = max(self.capacity * GROWTH, age)

    def was_gone(self, age: int) -> None:
        """An entry of this ``age`` (tokens) was no longer cached."""
        self._doubt += 1.0
        if self._doubt < DOUBT:
            return
        self.capacity = SHRINKAGE * max(age, min(self.capacity, self.given))

    def depth(self, hashes: Sequence[int], at: float) -> int:
        """How many of ``hashes`` are assumed cached, from the start; found by bisection."""
        if at - self.turned_at > self.turn_s:
            self._turn(at)
        young, old = self.young, self.old
        if not hashes or (hashes[0] not in young and hashes[0] not in old):
            return 0
        floor = self.given - self.capacity
        low, high = 0, len(hashes)
        # Most prompts are a known prefix and a short tail of their own.
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
        """A prompt with these ``hashes`` was sent there, with ``tokens`` uncached."""
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
