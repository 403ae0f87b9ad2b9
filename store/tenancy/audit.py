"""The audit trail: every change of tenants, keys and the deployment, in the transaction that makes it.

Triggers of the database refuse to change or delete an entry.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, insert, select

from policy.wire.accounting import Actor, AuditEntry, AuditQuery
from store.tenancy.tables import audit


def record(
    connection: Connection,
    at: float,
    actor: Actor,
    action: str,
    target: str,
    *,
    before: Any = None,
    after: Any = None,
) -> None:
    """Append one entry; ``before`` and ``after`` are what msgspec can encode, ``None`` for nothing."""
    connection.execute(
        insert(audit).values(
            at=at,
            actor=actor.name,
            role=actor.role.value,
            action=action,
            target=target,
            before=_json(before),
            after=_json(after),
        )
    )


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
