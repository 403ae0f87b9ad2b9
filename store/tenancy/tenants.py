"""Tenants in the database; the caller decides what a change may be."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, delete, func, insert, select, update

from policy.config.tenancy import Tenant
from store.tenancy.tables import tenants

_decode_tenant = msgspec.json.Decoder(Tenant).decode


class TenantRecord(NamedTuple):
    """A tenant; ``blocked``: its keys are refused."""

    tenant: Tenant
    blocked: bool
    created: float


def every_tenant(connection: Connection) -> list[TenantRecord]:
    """All tenants, by name."""
    return [_record(row) for row in connection.execute(select(tenants).order_by(tenants.c.name))]


def find_tenant(connection: Connection, name: str) -> TenantRecord | None:
    """The tenant called ``name``."""
    row = connection.execute(select(tenants).where(tenants.c.name == name)).first()
    return None if row is None else _record(row)


def count_tenants(connection: Connection) -> int:
    return int(connection.execute(select(func.count()).select_from(tenants)).scalar_one())


def insert_tenant(connection: Connection, record: TenantRecord) -> None:
    values = _values(record) | {"name": record.tenant.name, "created": record.created}
    connection.execute(insert(tenants).values(values))


def update_tenant(connection: Connection, record: TenantRecord) -> None:
    """Replace the settings of the tenant with this name."""
    connection.execute(update(tenants).where(tenants.c.name == record.tenant.name).values(_values(record)))


def delete_tenant(connection: Connection, name: str) -> None:
    connection.execute(delete(tenants).where(tenants.c.name == name))


def _values(record: TenantRecord) -> dict[str, Any]:
    return {"settings": msgspec.json.encode(record.tenant).decode(), "blocked": record.blocked}


def _record(row: Any) -> TenantRecord:
    return TenantRecord(_decode_tenant(row.settings), row.blocked, row.created)
