"""Admin keys of the database, with their roles: callers of the admin port beside the holder of its token."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from policy.wire.access_snapshot import AdminKeyRow
from policy.wire.accounting_api import AuditActor


class AdminKeys:
    """The admin keys by digest; ``wall`` gives Unix seconds, at which they expire."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._by_digest: dict[bytes, AdminKeyRow] = {}

    def take(self, rows: list[AdminKeyRow]) -> None:
        """Replace all keys."""
        self._by_digest = {bytes.fromhex(row.sha256): row for row in rows}

    def actor(self, key: bytes) -> AuditActor | None:
        """Who has this key, and in which role; ``None`` for one that is not valid."""
        row = self._by_digest.get(hashlib.sha256(key).digest())
        if row is None or (row.expires is not None and row.expires <= self._wall()):
            return None
        return AuditActor(f"admin key {row.name}", row.role)
