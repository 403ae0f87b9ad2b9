"""The simulated prefix cache: which blocks of a prompt were computed before, oldest use evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from policy.engine.kv_memory import BLOCK


class PrefixCache:
    """Chained hashes of full blocks, as many as the KV cache holds.

    As in vLLM, a block counts as cached from the moment its request is scheduled, and the last
    token of a prompt is always computed.
    """

    def __init__(self, kv_tokens: int) -> None:
        self._capacity = kv_tokens // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()

    def admit(self, tokens: Sequence[Hashable], salt: Hashable) -> int:
        """How many leading tokens of the prompt are cached; from now on all its full blocks are.

        ``salt`` separates what must not be shared: adapters, and tenants by ``cache_salt``.
        """
        blocks, chain, hits, unbroken = self._blocks, hash(salt), 0, True
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            chain = hash((chain, *tokens[start : start + BLOCK]))
            if chain in blocks:
                blocks.move_to_end(chain)
                hits += unbroken
            else:
                unbroken = False
                blocks[chain] = None
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)
        return min(hits * BLOCK, (len(tokens) - 1) // BLOCK * BLOCK)
