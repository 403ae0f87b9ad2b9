"""The database: created and migrated when opened, also by concurrent processes."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, event, text

import store.migrations
from policy.errors import PreconditionFailed, Unreachable
from store.adapters import database_tables
from store.database import Database
from store.election import tables as election_tables
from store.tenancy import spending, tables
from store.tenancy.spending import SpendBudget

MIGRATIONS = Path(store.migrations.__file__).parent


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 't.db'}"


def fill(url: str, revision: str, *statements: str) -> None:
    """Make a database as it was at ``revision``, and execute ``statements`` there."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    engine = create_engine(url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def test_the_migrations_create_the_tables_of_the_code(tmp_path: Path) -> None:
    database = Database(url(tmp_path))
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert election_tables.leases.metadata is tables.audit.metadata
        assert compare_metadata(context, tables.audit.metadata) == []
    database.close()


def test_a_migration_takes_over_what_was_spent(tmp_path: Path, database_url: str) -> None:
    fill(database_url, "0003", "INSERT INTO spending VALUES ('tenant t', '1d', 86400, 5)")
    database = Database(database_url)
    budget = SpendBudget("t", False, "1d", 86_400)
    with database.writing() as connection:
        spending.add(connection, {budget: 2})
        assert spending.read(connection, [budget]) == {budget: 7}
    database.close()


def test_the_settings_of_a_connection_are_durable(tmp_path: Path) -> None:
    database = Database(url(tmp_path))
    with database.reading() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2, "FULL"
        assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
    database.close()
    assert stat.S_IMODE((tmp_path / "t.db").stat().st_mode) == 0o600


def test_a_transaction_is_atomic(tmp_path: Path) -> None:
    database = Database(url(tmp_path))

    def half() -> None:
        with database.writing() as connection:
            database_tables.next_revision(connection)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    with database.reading() as connection:
        assert database_tables.revision(connection) == 0
    database.close()


@pytest.mark.slow
def test_concurrent_processes_can_create_the_database_and_write(tmp_path: Path) -> None:
    script = (
        "import sys; from store.database import Database\n"
        "from store.adapters.database_tables import next_revision\n"
        "database = Database(sys.argv[1])\n"
        "for _ in range(20):\n"
        "    with database.writing() as connection:\n"
        "        next_revision(connection)\n"
        "database.close()"
    )
    command = [sys.executable, "-W", "error", "-c", script, url(tmp_path)]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    for child in children:
        _, output = child.communicate(timeout=60)
        assert (child.returncode, output) == (0, b"")
    database = Database(url(tmp_path))
    with database.reading() as connection:
        assert database_tables.revision(connection) == 80
    database.close()


def test_a_database_of_a_newer_tidegate_is_refused(tmp_path: Path) -> None:
    Database(url(tmp_path)).close()
    engine = create_engine(url(tmp_path))
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'future'"))
    engine.dispose()
    with pytest.raises(PreconditionFailed, match="used by a newer Tidegate"):
        Database(url(tmp_path))


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.db").write_text("hello " * 1000)
    with pytest.raises(Unreachable, match="not a database"):
        Database(url(tmp_path))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nonsense", "expected sqlite:///PATH or postgresql://"),
        ("sqlite://", "several processes use the database"),
        ("sqlite:////proc/nowhere/t.db", "cannot be written"),
        ("oracle9://h/d", "there is no database called 'oracle9'"),
    ],
)
def test_unusable_databases_are_refused(where: str, message: str) -> None:
    with pytest.raises(PreconditionFailed, match=message):
        Database(where)


@pytest.mark.parametrize(
    "where",
    ["postgresql://u:KEY-1/d", "postgresql://u@h:KEY-1/d", "postgresql:///d?port=KEY-1"],
)
def test_a_url_that_cannot_be_read_is_refused_without_its_parts(where: str) -> None:
    with pytest.raises(PreconditionFailed, match="expected sqlite:///PATH or postgresql://") as caught:
        Database(where)
    shown = "".join(traceback.format_exception(caught.value))
    assert "KEY-1" not in shown.replace(where, "")


def test_a_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(PreconditionFailed, match="needs psycopg, which the lock files have: make install"):
        Database("postgresql://user:KEY-1@127.0.0.1:1/d")


def test_the_error_of_an_unreachable_server_hides_its_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(Unreachable, match="the database does not answer") as caught:
        Database("postgresql://user:KEY-1@127.0.0.1:1/d")
    assert "KEY-1" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_server_that_accepts_and_never_answers_is_unreachable() -> None:
    pytest.importorskip("psycopg")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(Unreachable, match="the database does not answer"):
            Database(f"postgresql://user@127.0.0.1:{port}/d?gssencmode=disable", busy_s=1.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", ("5", "5000", "3")), ("?connect_timeout=60&keepalives_idle=9", ("60", "5000", "9"))],
)
def test_connections_to_a_server_that_is_gone_are_given_up(given: str, expected: tuple[str, ...]) -> None:
    pytest.importorskip("psycopg")
    names = ("connect_timeout", "tcp_user_timeout", "keepalives_idle")
    asked = list[tuple[str, ...]]()

    def refuse(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, str]) -> None:
        asked.append(tuple(parameters[name] for name in names))
        raise ConnectionRefusedError

    event.listen(Engine, "do_connect", refuse)
    try:
        with pytest.raises(ConnectionRefusedError):
            Database(f"postgresql://user@127.0.0.1:1/d{given}")
    finally:
        event.remove(Engine, "do_connect", refuse)
    assert asked == [expected]


@pytest.mark.process
def test_postgresql_bounds_the_wait_for_other_transactions_but_not_for_migrations(
    postgresql_url: str,
) -> None:
    first, second = (Database(postgresql_url, busy_s) for busy_s in (30.0, 0.05))
    with first.writing(), pytest.raises(Unreachable, match="lock timeout"), second.writing():
        pass
    with second.writing() as connection:
        assert connection.execute(text("SHOW statement_timeout")).scalar() == "30s"
    with ThreadPoolExecutor(1) as thread:
        with first.writing():
            opening = thread.submit(Database, postgresql_url, 0.05)
            with first.reading() as connection:
                waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
                while not opening.done() and not connection.execute(waiting).scalar():
                    pass
                connection.execute(text("SELECT pg_sleep(0.2)"))
        opening.result().close()
    first.close()
    second.close()
