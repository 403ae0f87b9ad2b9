"""Tables of tenants, keys, the audit trail, leases of limits and the ledger."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import TypeEngine

revision = "0002"
down_revision = "0001"

_MESSAGE = "the audit trail is append-only"
_SQLITE = """
CREATE TRIGGER audit_{event} BEFORE {event} ON audit
BEGIN SELECT RAISE(ABORT, '{message}'); END
"""
_POSTGRESQL = (
    f"""
    CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION '{_MESSAGE}'; END $$
    """,
    """
    CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()
    """,
)


def _key(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, primary_key=True) for name in names]


def _required(kind: type[TypeEngine[Any]], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _dates() -> list[sa.Column[Any]]:
    optional = [sa.Column(name, sa.Double) for name in ("expires", "revoked")]
    return [*_required(sa.Double, "created"), *optional]


def _digest() -> sa.Column[str]:
    return sa.Column("sha256", sa.Text, nullable=False, unique=True)


def upgrade() -> None:
    """Create the tables, with the triggers that keep the audit trail."""
    op.create_table(
        "tenants",
        *_key("name"),
        *_required(sa.Text, "settings"),
        *_required(sa.Boolean, "blocked"),
        *_required(sa.Double, "created"),
    )
    op.create_table(
        "api_keys",
        *_key("id"),
        _digest(),
        sa.Column("tenant", sa.Text, nullable=False, index=True),
        *_required(sa.Text, "alias", "access"),
        *_dates(),
    )
    op.create_table("admin_keys", *_key("id"), _digest(), *_required(sa.Text, "name", "role"), *_dates())
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "audit",
        sa.Column("number", number, primary_key=True, autoincrement=True),
        *_required(sa.Double, "at"),
        *_required(sa.Text, "actor", "role", "action", "target"),
        sa.Column("before", sa.Text),
        sa.Column("after", sa.Text),
    )
    if op.get_bind().dialect.name == "sqlite":
        for event in ("UPDATE", "DELETE"):
            op.execute(_SQLITE.format(event=event, message=_MESSAGE))
    else:
        for statement in _POSTGRESQL:
            op.execute(statement)
    op.create_table(
        "ledger",
        *_key("day", "tenant", "key_id", "model", "adapter"),
        *_required(sa.BigInteger, "requests", "prompt_tokens", "cached_tokens", "output_tokens"),
        *_required(sa.BigInteger, "interrupted", "estimated", "cost_nano"),
        *_required(sa.Double, "joules"),
    )
    op.create_table("ledger_segments", *_key("segment", "host"), *_required(sa.LargeBinary, "bitmap"))
    op.create_table("spending", *_key("owner", "duration"), *_required(sa.BigInteger, "begin", "cost_nano"))
    op.create_table(
        "limit_leases", *_key("limit_id", "host"), *_required(sa.Double, "share", "demand", "expires")
    )
    op.create_table("hosts", *_key("host"), *_required(sa.Double, "seen"))
    name, value = sa.column("name", sa.Text), sa.column("value", sa.BigInteger)
    op.bulk_insert(sa.table("counters", name, value), [{"name": "access_revision", "value": 0}])
