"""API keys and admin keys in the database, by their digests; the caller decides what a change may be."""

from __future__ import annotations

import secrets
from typing import Any, TypeVar

import msgspec
from msgspec import structs
from sqlalchemy import ColumnElement, Connection, Table, and_, func, insert, or_, select, true, update

from policy.config.tenancy import AccessPolicy
from policy.wire.accounting_api import AdminRole
from store.tenancy.tables import admin_keys, api_keys

_ID_BYTES = 8
_decode_access = msgspec.json.Decoder(AccessPolicy).decode


class AnyKeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A key: ``sha256`` is its digest in hex; it is valid until ``expires`` or ``revoked``."""

    id: str
    sha256: str
    created: float
    expires: float | None = None
    revoked: float | None = None


class KeyRecord(AnyKeyRecord, frozen=True, kw_only=True):
    """An API key.

    ``first_id`` is the id of the first of the keys that replaced each other, ``None`` in that one: they share
    its limits.
    """

    tenant: str
    alias: str
    access: AccessPolicy
    first_id: str | None = None


class AdminKeyRecord(AnyKeyRecord, frozen=True, kw_only=True):
    """A key of the admin port."""

    name: str
    role: AdminRole


R = TypeVar("R", bound=AnyKeyRecord)


def new_id(prefix: str) -> str:
    """A public id: ``prefix``, a dash and 16 hex digits."""
    return f"{prefix}-{secrets.token_hex(_ID_BYTES)}"


def state_of(record: AnyKeyRecord, now: float) -> str:
    """``valid``, ``expired`` or ``revoked``."""
    if record.revoked is not None:
        return "revoked"
    return "expired" if record.expires is not None and record.expires <= now else "valid"


def every_key(
    connection: Connection, *, tenant: str | None = None, valid_at: float | None = None
) -> list[KeyRecord]:
    """The keys of all tenants or of one, oldest first; with ``valid_at`` those that are valid then."""
    chosen = true() if tenant is None else api_keys.c.tenant == tenant
    return [_key(row) for row in _rows(connection, api_keys, chosen, valid_at)]


def find_key(connection: Connection, key_id: str) -> KeyRecord | None:
    """The key with this id."""
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).first()
    return None if row is None else _key(row)


def first_keys(connection: Connection) -> dict[str, str]:
    """The ids of keys that were replaced first, by the ids of all that replaced them; ended ones too."""
    query = select(api_keys.c.id, api_keys.c.first_id).where(api_keys.c.first_id.is_not(None))
    return {row.id: row.first_id for row in connection.execute(query)}


def insert_key(connection: Connection, record: KeyRecord) -> None:
    values = structs.asdict(record) | {"access": msgspec.json.encode(record.access).decode()}
    connection.execute(insert(api_keys).values(values))


def every_admin_key(connection: Connection, *, valid_at: float | None = None) -> list[AdminKeyRecord]:
    """The admin keys, oldest first; with ``valid_at`` those that are valid then."""
    return [_admin_key(row) for row in _rows(connection, admin_keys, true(), valid_at)]


def find_admin_key(connection: Connection, name: str) -> AdminKeyRecord | None:
    """The newest admin key with this id or name."""
    chosen = or_(admin_keys.c.id == name, admin_keys.c.name == name)
    row = connection.execute(select(admin_keys).where(chosen).order_by(admin_keys.c.created.desc())).first()
    return None if row is None else _admin_key(row)


def insert_admin_key(connection: Connection, record: AdminKeyRecord) -> None:
    connection.execute(insert(admin_keys).values(structs.asdict(record)))


def end_key(connection: Connection, record: R) -> R:
    """Store when ``record`` expires and when it was revoked."""
    table = api_keys if isinstance(record, KeyRecord) else admin_keys
    values = {"expires": record.expires, "revoked": record.revoked}
    connection.execute(update(table).where(table.c.id == record.id).values(values))
    return record


def count_valid(connection: Connection, kind: type[AnyKeyRecord], now: float) -> int:
    """How many keys of a kind are valid."""
    table = api_keys if kind is KeyRecord else admin_keys
    chosen = _valid(table, now)
    return int(connection.execute(select(func.count()).select_from(table).where(chosen)).scalar_one())


def valid_by_tenant(connection: Connection, now: float) -> dict[str, int]:
    """How many keys of each tenant are valid."""
    rows = select(api_keys.c.tenant, func.count()).where(_valid(api_keys, now)).group_by(api_keys.c.tenant)
    return {row[0]: row[1] for row in connection.execute(rows)}


def _valid(table: Table, now: float) -> ColumnElement[bool]:
    return and_(table.c.revoked.is_(None), or_(table.c.expires.is_(None), table.c.expires > now))


def _rows(
    connection: Connection, table: Table, chosen: ColumnElement[bool], valid_at: float | None
) -> list[Any]:
    if valid_at is not None:
        chosen = and_(chosen, _valid(table, valid_at))
    found = connection.execute(select(table).where(chosen).order_by(table.c.created, table.c.id))
    return list(found)


def _key(row: Any) -> KeyRecord:
    fields = row._asdict()
    return KeyRecord(**fields | {"access": _decode_access(fields["access"])})


def _admin_key(row: Any) -> AdminKeyRecord:
    fields = row._asdict()
    return AdminKeyRecord(**fields | {"role": AdminRole(fields["role"])})
