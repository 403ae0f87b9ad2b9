"""The blocks of prompts of one model, by the hash of their deepest prefix: the same on all of its servers."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

# Of the keys of all prompts' blocks and of the objects that hold them: 370 bytes a prompt.
MAX_BYTES = 8 << 20
PROMPT_BYTES, KEY_BYTES = 370, 8
# What two prompts have in common says what a prefix is worth; more of them say little more.
ENOUGH = 2


class PromptBlocks(NamedTuple):
    """The keys of a prompt's full blocks, of ``size`` tokens each, and its ``tokens``."""

    keys: array[int]
    size: int
    tokens: int


class KnownPrompts:
    """The least recently used are forgotten. ``asking`` are the prefixes that are being asked for."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.asking: set[int] = set()
        self._max_bytes = max_bytes
        self._bytes = 0
        self._prompts: OrderedDict[int, list[PromptBlocks]] = OrderedDict()

    def of(self, deepest: int, size: int) -> list[PromptBlocks]:
        """Prompts whose deepest prefix this is, for a server with blocks of this size."""
        found = self._prompts.get(deepest)
        if found is None:
            return []
        self._prompts.move_to_end(deepest)
        return [each for each in found if each.size == size]

    def add(self, deepest: int, blocks: PromptBlocks) -> None:
        known = self._prompts.setdefault(deepest, [])
        self._prompts.move_to_end(deepest)
        if len(known) == ENOUGH:
            self._bytes -= _size(known.pop(0))
        known.append(blocks)
        self._bytes += _size(blocks)
        while self._bytes > self._max_bytes:
            _, gone = self._prompts.popitem(last=False)
            self._bytes -= sum(map(_size, gone))


def _size(blocks: PromptBlocks) -> int:
    return PROMPT_BYTES + KEY_BYTES * len(blocks.keys)
