"""The prefix cache of a simulated replica: which blocks of a prompt are there, as in vLLM's free-block queue.

Blocks of requests that run stay; those of others stay until KV is needed for who runs, and the one that was
let go of first leaves first. What is approximated: a block counts from when its request is admitted, though a
later chunk computes it; requests that share a block hold KV for it each, as :mod:`policy.engine.scheduler`
has it. Blocks of what was produced are not kept, as a trace does not name them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from policy.engine.kv_memory import BLOCK
from sim.arrival import BLOCK_TOKENS


class PrefixCache:
    """Blocks of :data:`sim.arrival.BLOCK_TOKENS` tokens, each standing for all before it, in so much KV.

    The last block of a prompt may have fewer tokens.
    """

    def __init__(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens
        self._held: dict[Hashable, int] = {}
        # Of each block that nobody holds its tokens, the first to leave first; and how many these are.
        self._left: OrderedDict[Hashable, int] = OrderedDict()
        self._tokens = 0

    def lookup(self, blocks: Sequence[Hashable], input_tokens: int) -> int:
        """How many leading tokens of a prompt of ``input_tokens`` are there.

        Never its last: an engine computes the block of its own that has it, of 16 tokens, as vLLM does.
        """
        hits = 0
        for block in blocks:
            if block not in self._held and block not in self._left:
                break
            hits += 1
        return min(hits * BLOCK_TOKENS, (input_tokens - 1) // BLOCK * BLOCK)

    def hold(self, blocks: Sequence[Hashable]) -> None:
        """A prompt of these blocks is in KV, until it is let go of."""
        for block in blocks:
            self._held[block] = self._held.get(block, 0) + 1
            self._tokens -= self._left.pop(block, 0)

    def let_go(self, blocks: Sequence[Hashable], tokens: int) -> None:
        """Who held these blocks is gone, after ``tokens`` of them were computed.

        The first block is the last to leave: without it the others are of no use. vLLM has that order.
        """
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            self._held[block] -= 1
            if self._held[block]:
                continue
            del self._held[block]
            size = min(BLOCK_TOKENS, tokens - index * BLOCK_TOKENS)
            if size > 0:
                self._left[block] = size
                self._tokens += size

    def spare(self, kv_used: int) -> int:
        """How many tokens more requests that run may hold than ``kv_used`` before a block leaves."""
        return self._kv_tokens - kv_used - self._tokens

    def make_room(self, kv_used: int) -> None:
        """Requests that run hold ``kv_used`` tokens: blocks leave that do not fit beside them."""
        room = self._kv_tokens - kv_used
        while self._left and self._tokens > room:
            self._tokens -= self._left.popitem(last=False)[1]
