"""The 64-bit keys of replicas, models, tenants and adapters, where their names would cost too much."""

from __future__ import annotations

import hashlib
import math

_MASK = 0xFFFF_FFFF_FFFF_FFFF

_UNIT = 1.0 / 2.0**64


def rendezvous(item: int, replica: int, weight: float = 1.0) -> float:
    """How strongly ``replica`` claims ``item``, both 64-bit hashes: -w / ln h(item, replica).

    The largest claim wins. Every process computes alike, the shares follow the weights, and a
    replica that comes or goes moves only what it wins or held (Thaler and Ravishankar, 1998, in
    the weighted form of Schindelhauer and Schomaker, 2005).
    """
    mixed = (item ^ (replica * 0x9E3779B97F4A7C15)) & _MASK
    # The finaliser of splitmix64: neighbouring inputs give unrelated outputs.
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    return -weight / math.log((mixed + 0.5) * _UNIT)


def hash_name(name: str) -> int:
    """The key of ``name``, alike in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
