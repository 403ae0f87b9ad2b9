"""64-bit keys of replicas, models, tenants, adapters and KV blocks, and weighted rendezvous hashing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Sequence
from typing import Final

_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_UNIT: Final = 1.0 / 2.0**64


def rendezvous(item: int, replica: int, weight: float = 1.0) -> float:
    """The score of ``replica`` for ``item``, both 64-bit hashes: -w / ln h(item, replica); the highest wins.

    Deterministic over processes; shares follow the weights, and a replica that joins or leaves moves only its
    own items (Thaler and Ravishankar, 1998, weighted as by Schindelhauer and Schomaker, 2005).
    """
    mixed = (item ^ (replica * 0x9E3779B97F4A7C15)) & _MASK
    # The finaliser of splitmix64: neighbouring inputs give unrelated outputs.
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    return -weight / math.log((mixed + 0.5) * _UNIT)


def hash_name(name: str) -> int:
    """The key of ``name``, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def block_keys(
    tokens: Sequence[Hashable], block_tokens: int, parent: int = 0, extras: Sequence[Hashable] = ()
) -> list[int]:
    """The key of each full block of ``tokens``, which continue the block ``parent`` (0: none).

    ``extras`` is what an engine adds to each block's identity beside its tokens, such as an adapter.
    """
    found = []
    for index, start in enumerate(range(0, len(tokens) - block_tokens + 1, block_tokens)):
        extra = extras[index] if extras else None
        parent = hash((parent, extra, *tokens[start : start + block_tokens]))
        found.append(parent)
    return found
