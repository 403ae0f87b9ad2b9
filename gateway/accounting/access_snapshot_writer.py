"""The file by which the workers of this host know the tenants and keys of the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from sqlalchemy import Connection

from gateway.accounting.access_transaction import AccessDatabase, PreparedSnapshot
from policy.wire.access_snapshot import AdminKeyRow, KeyRow, SnapshotHead, SnapshotLine, TenantRow
from store.database import counter
from store.state_dir import StateDir, write_atomic, write_beside
from store.tenancy.keys import every_admin_key, every_key
from store.tenancy.tables import REVISION
from store.tenancy.tenants import every_tenant

# Workers look five times a second.
FOLLOWED_S = 1.0


class AccessSnapshotWriter:
    """Written at the start, and when the revision of tenants and keys has changed or the clock was set back.

    Safe for all threads.

    ``in_force`` says whether all workers of this host have read the file of a revision.
    """

    def __init__(
        self,
        database: AccessDatabase,
        state: StateDir,
        in_force: Callable[[int], bool] = lambda revision: True,
    ) -> None:
        self._database = database
        self._path = state.access_path
        self._in_force = in_force
        self._writing = threading.Lock()
        self._revision = -1
        self._written_at = 0.0

    def prepare(self, connection: Connection) -> PreparedSnapshot:
        """Write what the transaction of a change leaves to a file beside; raises ``OSError``."""
        revision, now = counter(connection, REVISION), self._database.now()
        part = write_beside(self._path, _encoded(connection, revision, now), mode=0o600)
        return PreparedSnapshot(partial(self._put_in_force, revision, now, part), partial(_discard, part))

    def update(self) -> None:
        """Write the file if it is out of date; raises :class:`policy.errors.Unreachable` and ``OSError``."""
        with self._writing:
            with self._database.reading() as connection:
                revision = counter(connection, REVISION)
                now = self._database.now()
                # Of a clock that was set back the file may lack keys, which had ended by it.
                if revision == self._revision and now >= self._written_at:
                    return
                encoded = _encoded(connection, revision, now)
            write_atomic(self._path, encoded, mode=0o600)
            self._revision, self._written_at = revision, now

    def _put_in_force(self, revision: int, at: float, part: Path) -> None:
        """Replace the file, and wait until the workers have read it, but not for one that does not answer."""
        with self._writing:
            # Otherwise a later change was faster.
            if self._revision < revision:
                part.replace(self._path)
                self._revision, self._written_at = revision, at
        until = time.monotonic() + FOLLOWED_S
        while not self._in_force(revision) and time.monotonic() < until:
            time.sleep(0.01)


def _encoded(connection: Connection, revision: int, now: float) -> bytes:
    """The file of a revision: what is valid ``now``, in Unix seconds."""
    tenants = every_tenant(connection)
    keys = every_key(connection, valid_at=now)
    admins = every_admin_key(connection, valid_at=now)
    lines: list[SnapshotLine] = [
        SnapshotHead(
            revision=revision, tenants=len(tenants), keys=len(keys), admin_keys=len(admins)
        ),
        *(
            TenantRow(
                tenant=msgspec.structs.replace(each.tenant, metadata={}), blocked=each.blocked
            )
            for each in tenants
        ),
        *(
            KeyRow(
                id=each.id, sha256=each.sha256, tenant=each.tenant, alias=each.alias,
                access=msgspec.structs.replace(each.access, metadata={}), expires=each.expires,
                first_id=each.first_id,
            )
            for each in keys
        ),
        *(
            AdminKeyRow(
                id=each.id, sha256=each.sha256, name=each.name, role=each.role, expires=each.expires
            )
            for each in admins
        ),
    ]  # fmt: skip
    return msgspec.json.Encoder().encode_lines(lines)


def _discard(part: Path) -> None:
    with suppress(OSError):
        part.unlink(missing_ok=True)
