"""The database: embedded SQLite, or PostgreSQL by URL, with the tables of ``store/migrations``.

An acknowledged transaction survives a crash of the process and a power loss.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Connection,
    Engine,
    MetaData,
    Table,
    Text,
    create_engine,
    event,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.types import TypeEngine

from policy.errors import PreconditionFailed, Unreachable
from store.state_dir import locked

metadata = MetaData()


def key_columns(kind: type[TypeEngine[Any]], *names: str) -> list[Column[Any]]:
    """Columns of the primary key."""
    return [Column(name, kind, primary_key=True) for name in names]


def required_columns(kind: type[TypeEngine[Any]], *names: str) -> list[Column[Any]]:
    """Columns that hold a value in each row."""
    return [Column(name, kind, nullable=False) for name in names]


# Revisions, by what they count the changes of.
counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)
BUSY_S = 30
# How long a transaction on PostgreSQL may wait for the next statement of its process.
PAUSED_S = 5
# After so long a server that does not answer its network is taken for gone: TCP alone takes a quarter of an
# hour. Settings in the URL come first.
SILENT_S = 5
# How long PostgreSQL works on one statement that is no migration: callers wait no longer.
STATEMENT_S = 30
# The key of the advisory lock; arbitrary, to be unlikely on a shared PostgreSQL server.
_LOCK = 0x7469646567617465


class Database:
    """One database, migrated when it is opened; safe for all threads."""

    def __init__(self, url: str, busy_s: float = BUSY_S) -> None:
        """``busy_s`` bounds the wait for other processes' transactions, and that for a connection.

        Raises :class:`policy.errors.PreconditionFailed` for an unusable database, and
        :class:`policy.errors.Unreachable` for one that does not answer.
        """
        self._engine = _engine(url, busy_s)
        # SQLite transactions are snapshots already.
        self._reader = self._engine
        if self._engine.dialect.name == "postgresql":
            self._reader = self._engine.execution_options(isolation_level="REPEATABLE READ")
        try:
            self._migrate()
        except BaseException:
            self._engine.dispose()
            raise

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A snapshot transaction; raises :class:`policy.errors.Unreachable`."""
        with _answering(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """An exclusive write transaction among all processes; raises :class:`policy.errors.Unreachable`."""
        with self.updating() as connection:
            _exclude_others(connection)
            yield connection

    @contextmanager
    def updating(self) -> Iterator[Connection]:
        """A transaction of one statement that writes: on PostgreSQL it waits for no exclusive one."""
        with _answering(), self._engine.execution_options(writes=True).begin() as connection:
            yield connection

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may use it."""
        return self._engine.dialect.name != "sqlite"

    def close(self) -> None:
        self._engine.dispose()

    def _migrate(self) -> None:
        config = Config()
        config.set_main_option(
            "script_location", str(Path(__file__).parent / "migrations").replace("%", "%%")
        )
        with _prepared(self._engine.url), self.updating() as connection:
            if connection.dialect.name == "postgresql":
                # Another process may migrate, which takes its time.
                connection.execute(text("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0"))
            _exclude_others(connection)
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise PreconditionFailed(
                    f"the database {self._engine.url!r} was used by a newer Tidegate: {error}"
                ) from error


def counter(connection: Connection, name: str) -> int:
    """The value of the counter ``name``."""
    return int(connection.execute(select(counters.c.value).where(counters.c.name == name)).scalar_one())


def increment(connection: Connection, name: str) -> int:
    """Add one to the counter ``name`` and return it."""
    connection.execute(update(counters).where(counters.c.name == name).values(value=counters.c.value + 1))
    return counter(connection, name)


def _exclude_others(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def _engine(url: str, busy_s: float) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
            parsed = parsed.set(query=_network_bounds(busy_s) | parsed.query)
        # Replaces connections that a server or firewall has closed.
        engine = create_engine(parsed, pool_pre_ping=True)
    except ModuleNotFoundError as error:
        raise PreconditionFailed(
            f"store: {parsed.drivername} needs {error.name}, which the lock files have: make install"
        ) from error
    except NoSuchModuleError:
        raise PreconditionFailed(f"store: there is no database called {parsed.drivername!r}") from None
    except (ArgumentError, ValueError):
        # Their text has parts of the URL, such as a password in the place of a port.
        raise PreconditionFailed("store: expected sqlite:///PATH or postgresql://HOST/NAME") from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", partial(_settle, busy_s))
        event.listen(engine, "begin", _begin)
    else:
        event.listen(engine, "connect", partial(_bound_waits, busy_s))
    return engine


def _settle(busy_s: float, connection: Any, _record: Any) -> None:
    # Otherwise the driver begins transactions itself, and too late.
    connection.isolation_level = None
    cursor = connection.cursor()
    # The first connection to a new file is opened under the lock of :func:`_prepared`.
    settings = ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON")
    for pragma in (f"busy_timeout = {int(busy_s * 1000)}", *settings):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _network_bounds(busy_s: float) -> dict[str, str]:
    """What ends the wait for a server that falls silent: at connecting, with data sent, and without."""
    return {
        "connect_timeout": str(ceil(min(busy_s, SILENT_S))),
        "tcp_user_timeout": str(SILENT_S * 1000),
        "keepalives_idle": str(SILENT_S - 2),
        "keepalives_interval": "1",
        "keepalives_count": "2",
    }


def _bound_waits(busy_s: float, connection: Any, _record: Any) -> None:
    """Let the server end the transaction of a process that is paused within it: it may hold the lock."""
    bounds = {
        "idle_in_transaction_session_timeout": PAUSED_S,
        "lock_timeout": busy_s,
        "statement_timeout": STATEMENT_S,
    }
    with connection.cursor() as cursor:
        cursor.execute("; ".join(f"SET {name} = {int(seconds * 1000)}" for name, seconds in bounds.items()))
    connection.commit()


def _begin(connection: Connection) -> None:
    """Begin immediately: a transaction that reads first and then writes could not wait for another."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _prepared(url: URL) -> Iterator[None]:
    """Create the file of an embedded database with mode 600, and migrate it in one process at a time."""
    if url.get_backend_name() != "sqlite":
        yield
        return
    if not url.database or url.database == ":memory:":
        raise PreconditionFailed("store: expected sqlite:///PATH: several processes use the database")
    path = Path(url.database)
    with ExitStack() as held:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            held.enter_context(locked(path.with_name(f"{path.name}.lock")))
        except OSError as error:
            raise PreconditionFailed(f"store: {path} cannot be written: {error}") from error
        yield


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        # Its own text would repeat the statement and its values.
        raise Unreachable(f"the database does not answer: {error.orig}") from error
    except PoolTimeout as error:
        raise Unreachable(f"the database does not answer: {error}") from error
