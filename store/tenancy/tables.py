"""The tables of tenants, keys, the audit trail, leases of limits and the ledger.

Columns called ``at``, ``created``, ``revoked``, ``expires``, ``seen`` are Unix seconds.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, LargeBinary, Table, Text

from store.database import key_columns, metadata, required_columns

# The counter of changes of tenants, keys and admin keys.
REVISION = "access_revision"
# SQLite numbers rows itself only where the type is exactly INTEGER.
ROW_NUMBER = BigInteger().with_variant(Integer(), "sqlite")


def _columns_of_a_key() -> list[Column[Any]]:
    """``sha256`` is the key's digest in hex; times are Unix seconds."""
    return [
        Column("sha256", Text, nullable=False, unique=True),
        *required_columns(Double, "created"),
        Column("expires", Double),
        Column("revoked", Double),
    ]


# ``settings`` is a :class:`policy.config.tenancy.Tenant` as JSON.
tenants = Table(
    "tenants",
    metadata,
    *key_columns(Text, "name"),
    *required_columns(Text, "settings"),
    *required_columns(Boolean, "blocked"),
    *required_columns(Double, "created"),
)
# ``access`` is an :class:`policy.config.tenancy.AccessPolicy` as JSON. ``first_id`` is the id of the first of
# the keys that replaced each other, whose limits and spending they share; without a value in itself.
api_keys = Table(
    "api_keys",
    metadata,
    *key_columns(Text, "id"),
    *_columns_of_a_key(),
    Column("tenant", Text, nullable=False, index=True),
    *required_columns(Text, "alias", "access"),
    Column("first_id", Text, index=True),
)
admin_keys = Table(
    "admin_keys",
    metadata,
    *key_columns(Text, "id"),
    *_columns_of_a_key(),
    *required_columns(Text, "name", "role"),
)
# Triggers refuse to change or delete a row. ``before`` and ``after`` are JSON.
audit = Table(
    "audit",
    metadata,
    Column("number", ROW_NUMBER, primary_key=True, autoincrement=True),
    *required_columns(Double, "at"),
    *required_columns(Text, "actor", "role", "action", "target"),
    Column("before", Text),
    Column("after", Text),
)
# ``day`` is a UTC date (2026-01-31); ``cost_nano`` is in 1e-9 of the currency.
ledger = Table(
    "ledger",
    metadata,
    *key_columns(Text, "day", "tenant", "key_id", "model", "adapter"),
    *required_columns(BigInteger, "requests", "prompt_tokens", "cached_tokens", "output_tokens"),
    *required_columns(BigInteger, "interrupted", "estimated", "cost_nano"),
    *required_columns(Double, "joules"),
)
# Per segment of a host's usage journal, which slots are in the ledger already.
ledger_segments = Table(
    "ledger_segments",
    metadata,
    *key_columns(Text, "segment", "host"),
    *required_columns(LargeBinary, "bitmap"),
)
# What the owner of a budget ("tenant NAME" or "key ID") spent in the period since ``begin``, in 1e-9 of the
# currency; ``duration`` is that of the budget, empty without one.
spending = Table(
    "spending",
    metadata,
    *key_columns(Text, "owner", "duration"),
    *key_columns(BigInteger, "begin"),
    *required_columns(BigInteger, "cost_nano"),
)
# The share of a limit that a host may use until ``expires``, and the requests a second for it.
limit_leases = Table(
    "limit_leases",
    metadata,
    *key_columns(Text, "limit_id", "host"),
    *required_columns(Double, "share", "demand", "expires"),
)
hosts = Table("hosts", metadata, *key_columns(Text, "host"), *required_columns(Double, "seen"))
