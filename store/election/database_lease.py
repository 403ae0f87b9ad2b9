"""The controllers' lease as a row of the database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update

from policy.leader_election import LeaderLease
from store.database import Database
from store.election.tables import CONTROLLER, leases
from store.tenancy.ledger import insert_of

_FIELDS = LeaderLease.__struct_fields__


class DatabaseLease:
    """A lease store in ``database``; every call raises :class:`policy.errors.Unreachable`, and blocks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self) -> LeaderLease | None:
        """The lease; ``None`` before there was any."""
        with self._database.reading() as connection:
            row = connection.execute(select(leases)).one_or_none()
        return None if row is None else LeaderLease(**{name: getattr(row, name) for name in _FIELDS})

    def replace(self, seen: LeaderLease | None, new: LeaderLease) -> bool:
        """Write ``new`` if the lease is still the one that was ``seen``; whether it was."""
        values = {name: getattr(new, name) for name in _FIELDS}
        # Nobody's long transaction costs the leader its lease.
        with self._database.updating() as connection:
            if seen is None:
                insert: Any = insert_of(connection)(leases)
                statement = insert.values(name=CONTROLLER, **values).on_conflict_do_nothing()
                return connection.execute(statement.returning(leases.c.name)).first() is not None
            same = [leases.c[name] == getattr(seen, name) for name in ("holder", "term", "renewals")]
            return connection.execute(update(leases).where(*same).values(values)).rowcount == 1
