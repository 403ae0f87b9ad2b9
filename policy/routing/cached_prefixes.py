"""The prompt prefixes that are in one replica's KV cache: as its engine reports them, or else an estimate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from policy.wire.load_stream import CachedPrefix

# About one hash per 256 tokens: 16,384 cover several times the KV cache of any GPU, in about 2 MiB.
CAPACITY: Final = 16_384
AGE_S: Final = 1800.0
# A single late first token does not shrink the capacity, DOUBT of them do.
SHRINKAGE: Final = 0.95
GROWTH: Final = 1.005
DOUBT: Final = 3.0
FORGIVEN: Final = 0.9


class PrefixIndex:
    """The prefixes of one replica, as hashes of growing depth, each of which implies those before it.

    The generations ``young`` and ``old`` approximate an LRU list: the older is dropped whole at a turn, due
    ``turn_s`` after ``turned_at``. The bound is strict, the most recent half of it is always kept, and
    entries unused for ``age_s`` seconds are gone.

    Each hash maps to ``given``, the uncached tokens sent to the replica so far, at its last use: after
    ``capacity`` further tokens the engine has evicted it. The capacity in tokens is as reported, and
    corrected by first tokens. The router reads the generations directly, since most replicas hold nothing of
    a prompt.

    It is ``exact`` once the replica has reported what its engine holds. Then an entry is held until the
    report that it is gone: it stays, with the complement of its stamp, so that its last home is known. A
    prompt that was sent counts as held from then on. ``tokens`` are the reported tokens of entries, ``host``
    those of them that are in host memory only.
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
        self.exact = False
        self.tokens: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self._doubt = 0.0

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    def __contains__(self, key: int) -> bool:
        return key in self.young or key in self.old

    def age(self, key: int) -> int:
        """The uncached tokens sent since the last use of ``key``, which must be present."""
        stamp = self.young.get(key)
        if stamp is None:
            stamp = self.old[key]
        return self.given - (stamp if stamp >= 0 else ~stamp)

    def reset(self) -> None:
        """The replica holds nothing but what it reports from now on."""
        self.exact = True
        self.turn_s = self._age_s = math.inf
        for generation in (self.young, self.old):
            for key, stamp in generation.items():
                if stamp >= 0:
                    generation[key] = ~stamp
        self.host.clear()

    def report(self, held: Sequence[CachedPrefix], gone: Sequence[CachedPrefix], at: float) -> None:
        """The replica reports changes of what its engine holds; :meth:`reset` came before the first."""
        for each in held:
            key = each.hash
            self.tokens[key] = each.tokens + each.host_tokens
            if each.host_tokens:
                self.host[key] = each.host_tokens
            elif key in self.host:
                del self.host[key]
            stamp = self.young.get(key)
            if stamp is None:
                if len(self.young) >= self._half:
                    self._turn(at)
                stamp = self.old.get(key, self.given)
            self.young[key] = stamp if stamp >= 0 else ~stamp
        for each in gone:
            key = each.hash
            if key in self.host:
                del self.host[key]
            generation = self.young if key in self.young else self.old
            stamp = generation.get(key)
            if stamp is not None:
                self.tokens[key] = each.tokens
                if stamp >= 0:
                    generation[key] = ~stamp

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
        floor = 0.0 if self.exact else self.given - self.capacity
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
        if len(self.tokens) > 2 * self._half:
            self.tokens = {key: tokens for key, tokens in self.tokens.items() if key in self.old}
            self.host = {key: tokens for key, tokens in self.host.items() if key in self.old}
