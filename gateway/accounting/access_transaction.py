"""A change of tenants or keys: one transaction with its audit entry, then the file of the workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import Connection

from gateway.accounting.database_access import DatabaseAccess
from gateway.accounting.deployment_file_snapshot import DeploymentFileReader, DeploymentFileSnapshot
from policy.config.convert import require
from policy.config.tenancy import AccessPolicy
from policy.duration import DURATION, parse_duration
from policy.errors import Unreachable
from policy.wire.accounting_api import AuditActor, AuditEntry
from store.database import increment
from store.tenancy import audit, spending
from store.tenancy.tables import REVISION

log = logging.getLogger("tidegate.accounting")

# Later instants are likely milliseconds.
_LAST = 1e11


class AccessTransaction:
    """One change by ``actor`` at the instant ``now`` (Unix seconds), on an open transaction."""

    def __init__(self, connection: Connection, now: float, actor: AuditActor) -> None:
        self.connection = connection
        self.now = now
        self._actor = actor

    def record(self, action: str, target: str, *, before: Any = None, after: Any = None) -> None:
        """Append the change to the audit trail."""
        audit.record(self.connection, self.now, self._actor, action, target, before=before, after=after)


class PreparedSnapshot(NamedTuple):
    """The workers' file as a change leaves it, which needs no more room: put in force, or else discarded."""

    put_in_force: Callable[[], object] = lambda: None
    discard: Callable[[], object] = lambda: None


class AccessDatabase:
    """Reads and changes of tenants and keys; each blocks, and raises :class:`policy.errors.TidegateError`.

    ``prepare`` is called within the transaction of each change; ``now`` gives Unix seconds.
    """

    def __init__(
        self, database: DatabaseAccess, declared: DeploymentFileReader, now: Callable[[], float]
    ) -> None:
        self._database = database
        self._declared = declared
        self.prepare: Callable[[Connection], PreparedSnapshot] = lambda connection: PreparedSnapshot()
        self.now = now

    @property
    def declared(self) -> DeploymentFileSnapshot:
        return self._declared.get()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._database.get().reading() as connection:
            yield connection

    def add_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Append changes that other processes made."""
        with self._database.get().writing() as connection:
            audit.add(connection, entries)

    def recount_spending(self, budgets: Iterable[tuple[str, str]]) -> None:
        """Let the ledger say what was spent of budgets, given by their owners and durations."""
        with self._database.get().writing() as connection:
            spending.recount(connection, budgets)

    @contextmanager
    def changing(self, actor: AuditActor) -> Iterator[AccessTransaction]:
        """A transaction that is in force on this host when it ends, and on the others soon after.

        Without room for the workers' file nothing is changed. What is committed is never answered by an
        error: a new key could not be shown again.
        """
        prepared = PreparedSnapshot()
        try:
            with self._database.get().writing() as connection:
                yield AccessTransaction(connection, self.now(), actor)
                increment(connection, REVISION)
                prepared = self._prepared(connection)
            try:
                prepared.put_in_force()
            except OSError as error:
                log.warning("access_file: a change is not in force on this host yet: %s", error)
        finally:
            prepared.discard()

    def _prepared(self, connection: Connection) -> PreparedSnapshot:
        try:
            return self.prepare(connection)
        except OSError as error:
            raise Unreachable(f"the workers' file of keys cannot be written: {error}") from error


def access_of(given: AccessPolicy) -> AccessPolicy:
    """The limits and permissions alone of a structure that has more."""
    return AccessPolicy(**{name: getattr(given, name) for name in AccessPolicy.__struct_fields__})


def expiry(expires: float | None, duration: str | None, now: float) -> float | None:
    """When a key expires, given as one of two; raises :class:`policy.errors.ConfigError`."""
    if duration is not None:
        require(expires is None, "duration", duration, "nothing beside expires")
        seconds = parse_duration(duration)
        require(seconds, "duration", duration, DURATION)
        expires = now + seconds
    good = expires is None or now < expires < _LAST
    require(good, "expires", expires, "Unix seconds in the future")
    return expires


def check_text(path: str, text: str) -> None:
    """Check a free text that lists show."""
    good = len(text) <= 128 and text.isprintable()
    require(good, path, text[:128], "at most 128 printable characters")
