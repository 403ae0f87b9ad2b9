"""A throwaway server of an installed PostgreSQL, on a Unix socket; tests are skipped where there is none."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NUMBERS = itertools.count()
# PostgreSQL refuses to run as root.
_USER: dict[str, Any] = {} if os.getuid() else {"user": "nobody", "group": "nogroup", "extra_groups": []}


def _programs() -> Path | None:
    """The newest installation's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: path.parts[-3])
    return found[-1].parent if found else None


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Path]:
    """A running server: the folder of its socket."""
    pytest.importorskip("psycopg")
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    folder = Path(tempfile.mkdtemp(prefix="tidegate-pg-"))
    if _USER:
        entry = pwd.getpwnam(_USER["user"])
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    data = folder / "data"
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": folder, **_USER}
    initdb = [programs / "initdb", "-D", data, "-U", "tidegate", "-A", "trust", "--no-sync"]
    subprocess.run(initdb, check=True, **options)
    settings = {"listen_addresses": "", "unix_socket_directories": folder, "fsync": "off"}
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    server = subprocess.Popen([programs / "postgres", "-D", data, *arguments], **options)
    try:
        ready = [programs / "pg_isready", "-q", "-h", folder]
        deadline = time.monotonic() + 30
        while subprocess.run(ready, check=False, **options).returncode:
            assert server.poll() is None and time.monotonic() < deadline, "PostgreSQL does not start"
            time.sleep(0.05)
        yield folder
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder)


@pytest.fixture
def postgresql_url(postgresql_server: Path) -> str:
    """The URL of an empty database."""
    import psycopg  # noqa: PLC0415

    name = f"t{next(_NUMBERS)}"
    where = f"host={postgresql_server} user=tidegate dbname=postgres"
    with psycopg.connect(where, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    return f"postgresql://tidegate@/{name}?host={postgresql_server}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind; PostgreSQL in `make test-all`."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/t.db"
    url: str = request.getfixturevalue("postgresql_url")
    return url
