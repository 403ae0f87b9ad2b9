"""Tenants and keys of the database as the accounting process hands them to the workers of its host.

The file is NDJSON: a :class:`SnapshotHead`, then a line for each tenant and key, tenants first, so that a
worker can read it in pieces. Keys are digests; the file has mode 600 all the same.
"""

from __future__ import annotations

import msgspec

from policy.config.tenancy import AccessPolicy, Tenant
from policy.wire.accounting_api import AdminRole


class SnapshotHead(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    """The first line: the database's ``revision`` of tenants and keys, and how many lines follow."""

    revision: int
    tenants: int
    keys: int
    admin_keys: int


class TenantRow(msgspec.Struct, frozen=True, kw_only=True, tag="tenant"):
    """A tenant of the database. ``blocked``: its keys are refused."""

    tenant: Tenant
    blocked: bool = False


class KeyRow(msgspec.Struct, frozen=True, kw_only=True, tag="key"):
    """A key that is neither revoked nor expired when it is written.

    ``id`` is public (``key-`` and 16 hex digits), ``sha256`` the digest of the key in hex, ``expires`` Unix
    seconds. ``tenant`` may be one of the deployment file. ``first_id`` is the id of the first of the keys
    that replaced each other, ``None`` in that one: they share its limits.
    """

    id: str
    sha256: str
    tenant: str
    alias: str = ""
    access: AccessPolicy = AccessPolicy()
    expires: float | None = None
    first_id: str | None = None


class AdminKeyRow(msgspec.Struct, frozen=True, kw_only=True, tag="admin_key"):
    """A key of the admin port, as :class:`KeyRow`."""

    id: str
    sha256: str
    name: str
    role: AdminRole
    expires: float | None = None


SnapshotLine = SnapshotHead | TenantRow | KeyRow | AdminKeyRow
