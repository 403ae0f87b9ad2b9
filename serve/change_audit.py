"""Changes that users make through the controller, for the audit trail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from policy.deployment_file.parse import parse
from policy.errors import TidegateError
from policy.wire.accounting_api import AuditEntry, actor_in
from serve.async_waiting import run_in_thread
from serve.import_database_in_thread import import_database
from store.state_dir import StateDir
from store.tenancy import audit_spool

log = logging.getLogger("tidegate.controller")

_DRAIN_EVERY_S = 5.0


class ChangeAudit:
    """Entries go to a file of the state directory, from which the accounting process takes them.

    A controller on another machine than its gateways has none beside it, and adds them itself. ``wall`` gives
    Unix seconds.
    """

    def __init__(self, state: StateDir, wall: Callable[[], float]) -> None:
        self._state = state
        self._wall = wall

    async def record(
        self, headers: Mapping[str, str], action: str, target: str, *, before: Any = None, after: Any = None
    ) -> None:
        """Add a change by whom ``headers`` name; a full disk is logged, as the change was made."""
        actor = actor_in(headers, "the internal secret")
        entry = AuditEntry(
            at=self._wall(), actor=actor.name, role=actor.role.value, action=action, target=target,
            before=before, after=after,
        )  # fmt: skip
        try:
            await run_in_thread(partial(audit_spool.append, self._state, entry), "audit")
        except OSError as error:
            log.error("audit: %s %s by %s is not recorded: %s", action, target, actor.name, error)

    async def run(self) -> None:
        """Add entries to the database where no accounting process does, until cancelled."""
        while True:
            await asyncio.sleep(_DRAIN_EVERY_S)
            if self._state.accounting_socket_path.exists() or not self._state.audit_spool_path.exists():
                continue
            try:
                await run_in_thread(partial(audit_spool.drain, self._state, self._store), "audit")
            except (TidegateError, OSError) as error:
                log.warning("audit: %s", error)

    def _store(self, entries: Sequence[AuditEntry]) -> None:
        import_database()
        from store.database import Database  # noqa: PLC0415
        from store.tenancy import audit  # noqa: PLC0415

        deployment = parse(self._state.load(self._state.deployment_path, dict[str, object]))
        database = Database(self._state.database_url(deployment.store))
        try:
            with database.writing() as connection:
                audit.add(connection, entries)
        finally:
            database.close()
