"""The prefix cache of an engine: which blocks of prompts are in KV memory. Source: vLLM's free-block queue.

Blocks without a running request stay until running requests need their memory; the one released first is
evicted first. Approximations: a block counts from the admission of its request; requests that share a block
hold KV for it each, as in :mod:`policy.engine.batch_scheduler`; blocks of output tokens are not kept. With KV
offload an evicted block moves to host memory; vLLM copies each block there when it has been computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from policy.engine.performance_model import BLOCK


def block_hashes(tokens: Sequence[Hashable], salt: Hashable) -> tuple[int, ...]:
    """A hash for each full block of :data:`BLOCK` tokens, which stands for all tokens up to its end.

    Prompts with different salts share nothing.
    """
    chain, hashes = hash(salt), []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain = hash((chain, *tokens[start : start + BLOCK]))
        hashes.append(chain)
    return tuple(hashes)


class CacheChange(NamedTuple):
    """A ``block``, which continues ``parent``, was ``stored``, or removed, in device or ``host`` memory.

    A block that moves is stored first. The parent of one that moves to host memory is not given.
    """

    block: Hashable
    parent: Hashable | None
    stored: bool
    host: bool = False


class PrefixCache:
    """The cached blocks of one engine with ``kv_tokens`` tokens of KV memory.

    A block has ``block_tokens`` tokens and stands for all tokens before it too. The last block of a prompt
    may have fewer tokens. Up to ``host_tokens`` tokens of evicted blocks stay in host memory, of which the
    least recently evicted go first; a prompt that finds some takes them back. With ``reports`` the changes
    are kept until :meth:`take_changes`.
    """

    def __init__(
        self, kv_tokens: int, block_tokens: int = BLOCK, *, host_tokens: int = 0, reports: bool = False
    ) -> None:
        self._changes: list[CacheChange] | None = [] if reports else None
        self._kv_tokens = kv_tokens
        self._block_tokens = block_tokens
        self._held: dict[Hashable, int] = {}
        # Tokens of each block that no request holds, the next to be evicted first, and their sum.
        self._free: OrderedDict[Hashable, int] = OrderedDict()
        self._free_tokens = 0
        # The same of host memory.
        self._host: OrderedDict[Hashable, int] = OrderedDict()
        self._host_size = host_tokens
        self._host_used = 0

    def __contains__(self, block: Hashable) -> bool:
        return block in self._held or block in self._free or block in self._host

    def lookup(self, blocks: Sequence[Hashable], input_tokens: int) -> int:
        """How many leading tokens of a prompt of ``input_tokens`` are cached.

        The last token never is: the engine computes its own block of :data:`BLOCK` tokens with it, as vLLM.
        """
        hits = 0
        for block in blocks:
            if block not in self:
                break
            hits += 1
        return min(hits * self._block_tokens, (input_tokens - 1) // BLOCK * BLOCK)

    def in_host(self, blocks: Sequence[Hashable], cached_tokens: int) -> int:
        """How many of the leading ``cached_tokens`` tokens of a prompt are in host memory."""
        if not self._host:
            return 0
        found = 0
        for start, block in zip(range(0, cached_tokens, self._block_tokens), blocks, strict=False):
            if block in self._host:
                found += min(self._block_tokens, cached_tokens - start)
        return found

    def hold(self, blocks: Sequence[Hashable]) -> None:
        """A prompt of these blocks is in KV memory until it is released."""
        parent: Hashable | None = None
        for block in blocks:
            if self._changes is not None and block not in self._held and block not in self._free:
                self._changes.append(CacheChange(block, parent, stored=True))
            parent = block
            if block in self._host:
                self._host_used -= self._host.pop(block)
                self._gone(block, host=True)
            self._held[block] = self._held.get(block, 0) + 1
            self._free_tokens -= self._free.pop(block, 0)

    def release(self, blocks: Sequence[Hashable], tokens: int) -> None:
        """The request that held these blocks has ended, after ``tokens`` of them were computed.

        The first block is evicted last, as in vLLM: without it the others cannot be found.
        """
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            self._held[block] -= 1
            if self._held[block]:
                continue
            del self._held[block]
            size = min(self._block_tokens, tokens - index * self._block_tokens)
            if size > 0:
                self._free[block] = size
                self._free_tokens += size
            else:
                self._gone(block)

    def spare(self, kv_used: int) -> int:
        """How many tokens more than ``kv_used`` running requests may hold before a block is evicted."""
        return self._kv_tokens - kv_used - self._free_tokens

    def make_room(self, kv_used: int) -> None:
        """Running requests hold ``kv_used`` tokens: evict the blocks that do not fit beside them."""
        room = self._kv_tokens - kv_used
        while self._free and self._free_tokens > room:
            block, tokens = self._free.popitem(last=False)
            self._free_tokens -= tokens
            if self._host_size:
                self._offload(block, tokens)
            self._gone(block)

    def clear(self) -> None:
        """Evict every block that no request holds."""
        for block in self._free:
            self._gone(block)
        for block in self._host:
            self._gone(block, host=True)
        self._free.clear()
        self._host.clear()
        self._free_tokens = self._host_used = 0

    def take_changes(self) -> list[CacheChange]:
        """The changes since the last call, in order."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def _offload(self, block: Hashable, tokens: int) -> None:
        self._host[block] = tokens
        self._host_used += tokens
        if self._changes is not None:
            self._changes.append(CacheChange(block, None, stored=True, host=True))
        while self._host_used > self._host_size:
            last, size = self._host.popitem(last=False)
            self._host_used -= size
            self._gone(last, host=True)

    def _gone(self, block: Hashable, *, host: bool = False) -> None:
        if self._changes is not None:
            self._changes.append(CacheChange(block, None, stored=False, host=host))
