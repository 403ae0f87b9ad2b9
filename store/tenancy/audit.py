"""The audit trail: every change of tenants, keys and the deployment, in the transaction that makes it.

Triggers of the database refuse to change or delete an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs
from sqlalchemy import Connection, insert, select

from policy.wire.accounting_api import AuditActor, AuditEntry, AuditQuery
from store.tenancy.tables import audit


def record(
    connection: Connection,
    at: float,
    actor: AuditActor,
    action: str,
    target: str,
    *,
    before: Any = None,
    after: Any = None,
) -> None:
    """Append one entry; ``before`` and ``after`` are what msgspec can encode, ``None`` for nothing."""
    role = actor.role.value
    entry = AuditEntry(
        at=at, actor=actor.name, role=role, action=action, target=target, before=before, after=after
    )
    add(connection, [entry])


def add(connection: Connection, entries: Sequence[AuditEntry]) -> None:
    """Append ``entries``; the database numbers them."""
    rows = []
    for entry in entries:
        row = structs.asdict(entry) | {"before": _json(entry.before), "after": _json(entry.after)}
        del row["number"]
        rows.append(row)
    if rows:
        connection.execute(insert(audit), rows)


def read(connection: Connection, query: AuditQuery) -> list[AuditEntry]:
    """The entries of ``query``, newest first."""
    rows = select(audit).order_by(audit.c.number.desc()).limit(query.last)
    for column, value in ((audit.c.actor, query.actor), (audit.c.target, query.target)):
        if value is not None:
            rows = rows.where(column == value)
    if query.action is not None:
        rows = rows.where(audit.c.action.startswith(query.action, autoescape=True))
    if query.since is not None:
        rows = rows.where(audit.c.at >= query.since)
    if query.before_number is not None:
        rows = rows.where(audit.c.number < query.before_number)
    return [_entry(row._asdict()) for row in connection.execute(rows)]


def _entry(fields: dict[str, Any]) -> AuditEntry:
    for name in ("before", "after"):
        if fields[name] is not None:
            fields[name] = msgspec.json.decode(fields[name])
    return AuditEntry(**fields)


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
