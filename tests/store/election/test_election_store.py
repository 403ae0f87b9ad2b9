"""The lease in the database is replaced only where it is what was read; state of a lower term is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import select

from policy.errors import NotLeader
from policy.leader_election import LeaderLease
from store.database import Database
from store.election.database_lease import DatabaseLease
from store.election.database_state_dir import DatabaseStateDir
from store.election.tables import state


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = Database(database_url)
    yield made
    made.close()


def test_one_of_two_candidates_replaces_the_lease(database: Database) -> None:
    if database.is_shared:
        # An exclusive transaction of another process does not hold it up.
        with database.writing():
            one_replaces_the_lease(database)
    else:
        one_replaces_the_lease(database)


def one_replaces_the_lease(database: Database) -> None:
    store = DatabaseLease(database)
    first = LeaderLease(holder="a", address="a:1", term=1, lease_s=2.5, acquired_at=1.25, renewed_at=1.25)
    other = replace(first, holder="b", address="b:1")
    assert store.read() is None
    assert store.replace(None, first) and not store.replace(None, other)
    renewed = replace(first, renewals=1, renewed_at=2.75)
    assert store.replace(first, renewed) and store.read() == renewed
    assert not store.replace(first, replace(other, term=2))
    assert store.replace(renewed, replace(other, term=2))
    assert store.read() == replace(other, term=2)


def test_a_leader_finds_the_state_of_the_one_before_which_writes_no_more(
    database: Database, tmp_path: Path
) -> None:
    one, two = (DatabaseStateDir(tmp_path / str(term), database, term) for term in (1, 2))
    for each in (one, two):
        each.ensure().deployment_path.write_text(f'{{"of": {each.term}}}')
    one.claim()
    one.save(one.targets_path, {"m": 3})
    two.claim()
    # The document that was applied last, and not that of the host that took over.
    assert two.load(two.deployment_path, dict[str, int]) == {"of": 1}
    assert two.load(two.targets_path, dict[str, int]) == {"m": 3}
    with pytest.raises(NotLeader, match="term 2, after this one in term 1"):
        one.save(one.targets_path, {"m": 4})
    with pytest.raises(NotLeader):
        one.claim()
    # A process that won the same term, after the lease was deleted.
    with pytest.raises(NotLeader, match="has begun term 2"):
        DatabaseStateDir(tmp_path / "2", database, 2).claim()
    assert two.load(two.targets_path, dict[str, int]) == {"m": 3}
    # What only this host needs stays a file.
    one.save(one.controller_run_path, 5)
    assert one.controller_run_path.read_bytes() == b"5" and not two.controller_run_path.exists()
    assert two.load(two.memory_path, int) is None


def test_a_row_that_cannot_be_decoded_is_kept_under_another_name(database: Database, tmp_path: Path) -> None:
    one, two = (DatabaseStateDir(tmp_path, database, term) for term in (1, 2))
    one.ensure().deployment_path.write_text("{}")
    one.claim()
    one.save(one.targets_path, "of another version")
    one.save(one.controller_run_path, 5)
    assert one.set_aside(one.targets_path) == "the row targets.unreadable of controller_state"
    assert one.load(one.targets_path, str) is None
    with database.reading() as connection:
        rows = {row.name: bytes(row.value) for row in connection.execute(select(state))}
    assert rows == {"deployment.json": b"{}", "targets.unreadable": b'"of another version"'}
    one.set_aside(one.controller_run_path)
    assert not one.controller_run_path.exists()
    two.claim()
    with pytest.raises(NotLeader):
        one.set_aside(one.targets_path)
