"""Applies an engine's numbered batches of KV events to the index of its blocks.

Nothing of a batch is trusted: one that is malformed counts as lost. Source of format and numbering: vLLM's
``distributed/kv_events.py`` (0.32).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from policy.hashing import block_keys
from policy.routing.engine_prefix_index import KvBlockIndex
from policy.wire.kv_events import (
    FULL_ATTENTION,
    HOST_MEMORY,
    STORAGE,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEvent,
    decoded,
)

# Blocks of one engine that are followed, about 0.8 KB each; further ones do not count as held.
MAX_BLOCKS = 1 << 18


class KvEventLog:
    """The log of one engine, up to the batch before the one numbered ``next``.

    Blocks of ``index`` have the size of the first that is stored, if it is not known before. ``lost`` and
    ``malformed`` count batches. ``unsupported`` says why the events do not tell what a prompt finds, once
    they are seen not to.
    """

    def __init__(self, index: KvBlockIndex, max_blocks: int = MAX_BLOCKS) -> None:
        self.index = index
        self.next = 0
        self.lost = self.malformed = 0
        self.unsupported = ""
        self._max_blocks = max_blocks
        self._last: int | None = None
        self._keys: dict[BlockHash, int] = {}

    def is_last(self, number: int, payload: bytes) -> bool:
        """Whether this is the batch that was taken last: another log of the same length has another there."""
        return number == self.next - 1 and hash(payload) == self._last

    def restart(self) -> None:
        """The engine was replaced by one that holds nothing, and numbers its batches from 0."""
        self._keys.clear()
        self.index.restart()
        self.next, self._last = 0, None

    def take(self, number: int, payload: bytes) -> None:
        """Apply the batch of this number; those between are lost, and earlier ones are known already."""
        if number < self.next:
            return
        if number > self.next:
            self.lost += number - self.next
            self._forget()
        self.next, self._last = number + 1, hash(payload)
        try:
            for event in decoded(payload):
                self._apply(event)
        except (ValueError, TypeError, LookupError, RecursionError):
            self.malformed += 1
            self._forget()

    def _forget(self) -> None:
        self._keys.clear()
        self.index.lost()

    def _apply(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.index.cleared()
            # No removals of its blocks follow.
            self._keys = {each: key for each, key in self._keys.items() if self.index.holds(key)}
        elif event.group_idx:
            self.unsupported = "its model has several KV cache groups"
        elif event.medium == STORAGE:
            return
        elif isinstance(event, BlockRemoved):
            self._removed(event)
        else:
            self._stored(event)

    def _stored(self, event: BlockStored) -> None:
        hashes, parent, size = event.block_hashes, 0, event.block_size
        if event.kv_cache_spec_kind not in FULL_ATTENTION:
            self.unsupported = f"its attention is of the kind {event.kv_cache_spec_kind!r:.40}"
            return
        if event.parent_block_hash is not None:
            if (known := self._keys.get(event.parent_block_hash)) is None:
                return
            parent = known
        if event.medium == HOST_MEMORY:
            # These events leave out what else identifies a block; all of them were in device memory before.
            for each in hashes:
                if (key := self._keys.get(each)) is not None:
                    self.index.stored((key,), parent, host=True)
                    parent = key
            return
        if not self.index.block_tokens and size > 0:
            self.index.block_tokens = size
        if size != self.index.block_tokens or len(self._keys) + len(hashes) > self._max_blocks:
            return
        extras = [hashable(extra) for extra in event.extra_keys or ()]
        keys = block_keys(event.token_ids, size, parent, extras if any(extras) else ())
        self._keys.update(zip(hashes, keys, strict=True))
        self.index.stored(keys, parent)

    def _removed(self, event: BlockRemoved) -> None:
        for each in event.block_hashes:
            if (key := self._keys.get(each)) is not None:
                self.index.removed(key, host=event.medium == HOST_MEMORY)
                if not self.index.holds(key):
                    del self._keys[each]


def hashable(value: Any) -> Hashable:
    """What identifies a block beside its tokens, with tuples for lists."""
    return tuple(hashable(each) for each in value) if isinstance(value, list | tuple) else value
