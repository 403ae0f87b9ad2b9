"""The prefix cache of a simulated replica: which blocks of a prompt are there, the oldest use evicted first.

What is approximated: a block counts from when its request is admitted, though a later chunk computes it.
The cache holds as many tokens as KV does, whatever runs: requests that run hold theirs besides. Blocks of
what was produced are not kept, as a trace does not name them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from sim.trace import BLOCK_TOKENS


class PrefixCache:
    """Blocks of :data:`sim.trace.BLOCK_TOKENS` tokens, each standing for all before it, up to a capacity."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def lookup(self, blocks: Sequence[Hashable], input_tokens: int) -> int:
        """How many leading tokens of a prompt of ``input_tokens`` are there; never its last, as in vLLM."""
        hits = 0
        for block in blocks:
            if block not in self._blocks:
                break
            hits += 1
        return min(hits * BLOCK_TOKENS, input_tokens - 1)

    def insert(self, blocks: Sequence[Hashable]) -> None:
        """A prompt of these blocks is used.

        Its first block is the youngest: without it the others are of no use. vLLM frees them in that order.
        """
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
