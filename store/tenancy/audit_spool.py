"""Audit entries of processes that do not open the database, in a file until the accounting process adds them.

An entry is durable when :func:`append` returns. After a crash between the two it may be added twice.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from policy.wire.accounting_api import AuditEntry
from store.state_dir import StateDir, locked

_decode = msgspec.json.Decoder(AuditEntry).decode


def append(state: StateDir, entry: AuditEntry) -> None:
    """Add one entry; raises ``OSError``. It blocks for a write to the disk."""
    path = state.ensure().audit_spool_path
    with locked(_lock(path)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            line = msgspec.json.encode(entry) + b"\n"
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # Otherwise it would continue a line that a crash has cut.
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drain(state: StateDir, store: Callable[[Sequence[AuditEntry]], None]) -> None:
    """Give all entries to ``store``, and forget them when it returns. A line cut by a crash is skipped."""
    path = state.audit_spool_path
    if not path.exists():
        return
    with locked(_lock(path)):
        entries = []
        for line in path.read_bytes().splitlines():
            try:
                entries.append(_decode(line))
            except msgspec.DecodeError:
                continue
        store(entries)
        path.unlink()


def _lock(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")
