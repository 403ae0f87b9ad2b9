"""The database of the accounting process, opened when it first answers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from policy.errors import PreconditionFailed, Unreachable
from store.database import Database

# How long a change waits for other processes' transactions.
BUSY_S = 5.0


class DatabaseAccess:
    """A database that may not answer yet; safe for all threads. ``url`` is read until it was opened."""

    def __init__(self, url: Callable[[], str]) -> None:
        self._url = url
        self._opening = threading.Lock()
        self._database: Database | None = None
        self._failures = 0
        self._problem = ""

    def get(self) -> Database:
        """The database; raises :class:`policy.errors.Unreachable` while it cannot be opened."""
        failures = self._failures
        with self._opening:
            if self._database is None:
                if self._failures != failures:
                    # Another thread has tried meanwhile: many that wait would each take as long in turn.
                    raise Unreachable(self._problem)
                try:
                    self._database = Database(self._url(), BUSY_S)
                except (PreconditionFailed, Unreachable) as error:
                    self._failures += 1
                    self._problem = str(error)
                    raise Unreachable(self._problem) from error
            return self._database

    def close(self) -> None:
        with self._opening:
            if self._database is not None:
                self._database.close()
