"""Follow the file of tenants and keys that the accounting process writes; read it in pieces.

A file that cannot be read leaves the last tenants and keys in force.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gateway.intake.admin_keys import AdminKeys
from gateway.intake.authentication import TenantDirectory
from gateway.telemetry.structured_log import StructuredLog
from policy.wire.access_snapshot import AdminKeyRow, KeyRow, SnapshotHead, SnapshotLine, TenantRow
from store.event_loop.timer_coalescing import sleep_to_next
from store.watched_files import WatchedFiles

LOOK_EVERY_S = 0.2
# Some 200 keys, which take a millisecond.
PIECE_BYTES = 32 * 1024
# Some 2,500 keys.
MANY_BYTES = 1024 * 1024

_LINES = msgspec.json.Decoder(SnapshotLine)


@contextmanager
def _without_collections(data: bytes) -> Iterator[None]:
    """Let no garbage collection look at the objects of many keys, now or later: it would take 60 ms.

    They are no garbage until they are replaced, and are freed by their reference counts then.
    """
    if len(data) < MANY_BYTES:
        yield
        return
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class AccessFeed:
    """The tenants and keys of the database in this worker, by the file at ``path``; none without it.

    ``in_force`` is called with the revision of each file that is in force.
    """

    def __init__(
        self,
        path: Path,
        tenants: TenantDirectory,
        admin_keys: AdminKeys,
        log: StructuredLog,
        in_force: Callable[[int], None] = lambda revision: None,
    ) -> None:
        self._path = path
        self._file = WatchedFiles(path)
        self._tenants = tenants
        self._admin_keys = admin_keys
        self._log = log
        self._in_force = in_force
        self._read_with = -1

    def start_from_disk(self) -> None:
        """Read the file at once, before the first request."""
        try:
            if self._changed():
                for _ in self._pieces(self._path.read_bytes()):
                    pass
        except (OSError, ValueError) as error:
            self._log.error("access_file_refused", cause=error)

    async def run(self) -> None:
        """Read the file when it or the deployment has changed, until cancelled."""
        while True:
            await sleep_to_next(LOOK_EVERY_S)
            try:
                if not self._changed():
                    continue
                data = await asyncio.to_thread(self._path.read_bytes)
                with _without_collections(data):
                    for _ in self._pieces(data):
                        await asyncio.sleep(0)
            except (OSError, ValueError) as error:
                self._log.error("access_file_refused", cause=error)
                await asyncio.sleep(1.0)

    def _changed(self) -> bool:
        """Whether there is a file that has to be read."""
        changed = self._file.changed() or self._tenants.changed != self._read_with
        return changed and self._path.exists()

    def _pieces(self, data: bytes) -> Iterator[None]:
        """Read ``data`` in pieces, and put it in force at the end; raises ``ValueError``."""
        draft, admin_keys, changed = self._tenants.draft(), list[AdminKeyRow](), self._tenants.changed
        head: SnapshotHead | None = None
        begin = 0
        while begin < len(data):
            end = data.find(b"\n", begin + PIECE_BYTES) + 1 or len(data)
            for row in _LINES.decode_lines(data[begin:end]):
                if isinstance(row, TenantRow):
                    draft.add_tenant(row)
                elif isinstance(row, KeyRow):
                    draft.add_key(row)
                elif isinstance(row, AdminKeyRow):
                    admin_keys.append(row)
                else:
                    head = row
            begin = end
            yield
        if head is None or len(draft.tenants) != head.tenants or len(admin_keys) != head.admin_keys:
            raise ValueError("the file of tenants and keys is not complete")
        # Keys are checked against the deployment with which they were read; another is read again at once.
        if self._tenants.changed == changed:
            self._tenants.take(draft)
            self._admin_keys.take(admin_keys)
            self._in_force(head.revision)
        self._file.were_read()
        self._read_with = changed
