"""The state of the controller that leads, in the database, where the next leader finds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, delete, select, update

from policy.errors import NotLeader
from store.database import Database, counter, counters
from store.election.tables import TERM, state
from store.state_dir import StateDir
from store.tenancy.ledger import insert_of

T = TypeVar("T")


@dataclass(frozen=True)
class DatabaseStateDir(StateDir):
    """A state directory whose files that the next leader needs are rows of the ``database``.

    They are those of the leader of ``term``: after :meth:`claim` those of lower terms write nothing any more.
    """

    database: Database
    term: int

    def claim(self) -> None:
        """Begin the term; the deployment of this directory counts where there is none in the database.

        Raises :class:`policy.errors.NotLeader` for a term that is over, and for one that was claimed: two
        processes win the same term where the lease was deleted between.
        """
        with self.database.writing() as connection:
            self._check(connection)
            if counter(connection, TERM) == self.term:
                raise NotLeader(f"another controller has begun term {self.term}")
            connection.execute(update(counters).where(counters.c.name == TERM).values(value=self.term))
            if _read(connection, self.deployment_path.name) is None:
                _write(connection, self.deployment_path.name, self.deployment_path.read_bytes())

    def load(self, path: Path, kind: type[T]) -> T | None:
        if not self._is_shared(path):
            return super().load(path, kind)
        with self.database.reading() as connection:
            found = _read(connection, path.name)
        return None if found is None else msgspec.json.decode(found, type=kind)

    def save(self, path: Path, value: Any) -> None:
        """Raises :class:`policy.errors.NotLeader` after another leader's claim."""
        if not self._is_shared(path):
            super().save(path, value)
            return
        with self.database.writing() as connection:
            self._check(connection)
            _write(connection, path.name, msgspec.json.encode(value))

    def set_aside(self, path: Path) -> str:
        """Raises :class:`policy.errors.NotLeader` after another leader's claim."""
        if not self._is_shared(path):
            return super().set_aside(path)
        aside = path.with_suffix(".unreadable").name
        with self.database.writing() as connection:
            self._check(connection)
            if (found := _read(connection, path.name)) is not None:
                _write(connection, aside, found)
                connection.execute(delete(state).where(state.c.name == path.name))
        return f"the row {aside} of {state.name}"

    def _check(self, connection: Connection) -> None:
        if (highest := counter(connection, TERM)) > self.term:
            raise NotLeader(f"another controller leads in term {highest}, after this one in term {self.term}")

    def _is_shared(self, path: Path) -> bool:
        return path in (
            *(self.deployment_path, self.targets_path, self.hosts_path, self.gpu_groups_path),
            *(self.memory_path, self.removed_path, self.checked_bases_path),
        )


def highest_term(database: Database) -> int:
    """The highest term whose leader has claimed the state: a lease that was lost begins above it."""
    with database.reading() as connection:
        return counter(connection, TERM)


def _read(connection: Connection, name: str) -> bytes | None:
    found = connection.execute(select(state.c.value).where(state.c.name == name)).scalar_one_or_none()
    return None if found is None else bytes(found)


def _write(connection: Connection, name: str, value: bytes) -> None:
    insert: Any = insert_of(connection)(state)
    changed = {"value": insert.excluded.value}
    statement = insert.on_conflict_do_update(index_elements=["name"], set_=changed)
    connection.execute(statement, {"name": name, "value": value})
