"""The 64-bit keys of replicas, models, tenants and adapters, where their names would cost too much."""

from __future__ import annotations

import hashlib


def key_of(name: str) -> int:
    """The key of ``name``, alike in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
