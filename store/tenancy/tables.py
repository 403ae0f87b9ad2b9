"""The tables of tenants, keys, the audit trail, leases of limits and the ledger.

Columns called ``at``, ``created``, ``revoked``, ``expires``, ``seen`` are Unix seconds.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, LargeBinary, Table, Text
from sqlalchemy.types import TypeEngine

from store.database import metadata

# The counter of changes of tenants, keys and admin keys.
REVISION = "access_revision"
# SQLite numbers rows itself only where the type is exactly INTEGER.
ROW_NUMBER = BigInteger().with_variant(Integer(), "sqlite")


def _key(kind: type[TypeEngine[Any]], *names: str) -> list[Column[Any]]:
    return [Column(name, kind, primary_key=True) for name in names]


def _required(kind: type[TypeEngine[Any]], *names: str) -> list[Column[Any]]:
    return [Column(name, kind, nullable=False) for name in names]


# ``settings`` is a :class:`policy.config.tenancy.Tenant` as JSON.
tenants = Table(
    "tenants",
    metadata,
    *_key(Text, "name"),
    *_required(Text, "settings"),
    *_required(Boolean, "blocked"),
    *_required(Double, "created"),
)
# ``access`` is a :class:`policy.config.tenancy.Access` as JSON; ``sha256`` the key's digest in hex.
api_keys = Table(
    "api_keys",
    metadata,
    *_key(Text, "id"),
    Column("sha256", Text, nullable=False, unique=True),
    Column("tenant", Text, nullable=False, index=True),
    *_required(Text, "alias", "access"),
    *_required(Double, "created"),
    Column("expires", Double),
    Column("revoked", Double),
)
admin_keys = Table(
    "admin_keys",
    metadata,
    *_key(Text, "id"),
    Column("sha256", Text, nullable=False, unique=True),
    *_required(Text, "name", "role"),
    *_required(Double, "created"),
    Column("expires", Double),
    Column("revoked", Double),
)
# Triggers refuse to change or delete a row. ``before`` and ``after`` are JSON.
audit = Table(
    "audit",
    metadata,
    Column("number", ROW_NUMBER, primary_key=True, autoincrement=True),
    *_required(Double, "at"),
    *_required(Text, "actor", "role", "action", "target"),
    Column("before", Text),
    Column("after", Text),
)
# ``day`` is a UTC date (2026-01-31); ``cost_nano`` is in 1e-9 of the currency.
ledger = Table(
    "ledger",
    metadata,
    *_key(Text, "day", "tenant", "key_id", "model", "adapter"),
    *_required(BigInteger, "requests", "prompt_tokens", "cached_tokens", "output_tokens"),
    *_required(BigInteger, "interrupted", "estimated", "cost_nano"),
    *_required(Double, "joules"),
)
# Per segment of a host's usage journal, which slots are in the ledger already.
ledger_segments = Table(
    "ledger_segments", metadata, *_key(Text, "segment", "host"), *_required(LargeBinary, "bitmap")
)
# What the owner of a budget ("tenant NAME" or "key ID") spent in the period since ``begin``, in 1e-9 of the
# currency; ``duration`` is that of the budget, empty without one.
spending = Table(
    "spending",
    metadata,
    *_key(Text, "owner", "duration"),
    *_required(BigInteger, "begin", "cost_nano"),
)
# The share of a limit that a host may use until ``expires``, and the requests a second for it.
limit_leases = Table(
    "limit_leases",
    metadata,
    *_key(Text, "limit_id", "host"),
    *_required(Double, "share", "demand", "expires"),
)
hosts = Table("hosts", metadata, *_key(Text, "host"), *_required(Double, "seen"))
