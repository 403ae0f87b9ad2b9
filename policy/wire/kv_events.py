"""The events that an engine publishes of its KV cache.

They are defined by vLLM's ``distributed/kv_events.py`` (0.32).
vLLM sends each event as a map; its versions before, and other engines, as an array in the same order.
"""

from __future__ import annotations

from typing import Any

import msgspec

BlockHash = int | bytes
# The tiers of memory in `medium` that are not the device's.
HOST_MEMORY = "CPU"
STORAGE = "STORAGE"
# The kinds of attention of which a prompt finds its longest stored beginning; `None`: not said.
FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention"})


class BlockStored(msgspec.Struct, tag="BlockStored", gc=False):
    """Consecutive blocks after ``parent_block_hash``; ``extra_keys``: what identifies each beside tokens."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Each of the blocks lost one copy."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Device memory holds no block any more."""


class _StoredArray(BlockStored, tag="BlockStored", array_like=True, gc=False):
    """The same, as an array."""


class _RemovedArray(BlockRemoved, tag="BlockRemoved", array_like=True, gc=False):
    """The same, as an array."""


class _ClearedArray(AllBlocksCleared, tag="AllBlocksCleared", array_like=True, gc=False):
    """The same, as an array."""


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


_MAPS = msgspec.msgpack.Decoder(_Batch)
_ARRAYS = msgspec.msgpack.Decoder(_ArrayBatch)

KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def decoded(payload: bytes) -> list[KvEvent]:
    """The events of one batch; raises ``ValueError`` if they are none."""
    try:
        return [*_MAPS.decode(payload).events]
    except msgspec.ValidationError:
        return [*_ARRAYS.decode(payload).events]
    except RecursionError:
        raise ValueError("the batch is nested too deep") from None
