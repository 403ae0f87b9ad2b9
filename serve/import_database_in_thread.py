"""The import of the database, which takes long: threads that use it do so when they begin to."""

from __future__ import annotations

import threading

_ONE_AT_A_TIME = threading.Lock()


def import_database() -> None:
    """Import it, unless it is: two threads that import SQLAlchemy at once find parts of it half made."""
    with _ONE_AT_A_TIME:
        import store.database  # noqa: F401, PLC0415
