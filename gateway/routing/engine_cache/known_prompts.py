"""The blocks of prompts of one model, by the hash of their deepest prefix: the same on all of its servers."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

# Blocks of all prompts together, 8 bytes each; a prompt counts for one at least.
MAX_BLOCKS = 1 << 20
# What two prompts have in common says what a prefix is worth; more of them say little more.
ENOUGH = 2


class Blocks(NamedTuple):
    """The keys of a prompt's full blocks, of ``size`` tokens each, and its ``tokens``."""

    keys: array[int]
    size: int
    tokens: int


class KnownPrompts:
    """The least recently used are forgotten. ``asking`` are the prefixes that are being asked for."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.asking: set[int] = set()
        self._max_blocks = max_blocks
        self._blocks = 0
        self._prompts: OrderedDict[int, list[Blocks]] = OrderedDict()

    def of(self, deepest: int, size: int) -> list[Blocks]:
        """Prompts whose deepest prefix this is, for a server with blocks of this size."""
        found = self._prompts.get(deepest)
        if found is None:
            return []
        self._prompts.move_to_end(deepest)
        return [each for each in found if each.size == size]

    def add(self, deepest: int, blocks: Blocks) -> None:
        known = self._prompts.setdefault(deepest, [])
        self._prompts.move_to_end(deepest)
        if len(known) == ENOUGH:
            self._blocks -= _count(known.pop(0))
        known.append(blocks)
        self._blocks += _count(blocks)
        while self._blocks > self._max_blocks:
            _, gone = self._prompts.popitem(last=False)
            self._blocks -= sum(map(_count, gone))


def _count(blocks: Blocks) -> int:
    """At least one: prompts without a full block take memory too."""
    return max(1, len(blocks.keys))
