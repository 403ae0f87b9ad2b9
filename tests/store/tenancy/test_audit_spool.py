"""An entry that was appended is drained, whatever became of the one before it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policy.wire.accounting_api import AuditEntry
from store.state_dir import StateDir
from store.tenancy import audit_spool


def append(state: StateDir, action: str) -> None:
    audit_spool.append(state, AuditEntry(at=1.0, actor="a", role="admin", action=action, target="m"))


def drained(state: StateDir) -> list[str]:
    found: list[AuditEntry] = []
    audit_spool.drain(state, found.extend)
    return [entry.action for entry in found]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel writes what fits and reports a short count, as on a disk that is full within an entry."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_entry_without_room_is_refused_and_those_around_it_stay(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    append(state, "one")
    size = state.audit_spool_path.stat().st_size
    with files_of_at_most(size + 20), pytest.raises(OSError, match="No space left"):
        append(state, "two")
    assert state.audit_spool_path.stat().st_size == size
    append(state, "three")
    assert drained(state) == ["one", "three"]


def test_an_entry_after_a_line_that_a_crash_has_cut_is_whole(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    append(state, "one")
    with state.audit_spool_path.open("ab") as file:
        file.write(b'{"at": 1.0, "actor')
    append(state, "three")
    append(state, "four")
    assert drained(state) == ["one", "three", "four"]
