"""Tables of adapters: names, versions, the current split of each name, and its former splits."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import TypeEngine

revision = "0001"
down_revision = None


def _name() -> list[sa.Column[str]]:
    return [sa.Column("model", sa.Text, primary_key=True), sa.Column("name", sa.Text, primary_key=True)]


def _required(kind: type[TypeEngine[Any]], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def upgrade() -> None:
    """Create the tables; the revision counter starts at 0."""
    key, version = ["model", "name"], ["model", "name", "number"]
    of_name = [f"aliases.{column}" for column in key]
    op.create_table(
        "aliases",
        *_name(),
        *_required(sa.BigInteger, "revision"),
        *_required(sa.Text, "tenants", "origin", "declared"),
        *_required(sa.Double, "at"),
    )
    op.create_table(
        "versions",
        *_name(),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("digest", sa.Text, nullable=False, index=True),
        *_required(sa.Integer, "rank"),
        *_required(sa.BigInteger, "size"),
        *_required(sa.Text, "source"),
        *_required(sa.Double, "at"),
        sa.ForeignKeyConstraint(key, of_name, ondelete="CASCADE"),
        sa.UniqueConstraint("model", "name", "digest"),
    )
    op.create_table(
        "splits",
        *_name(),
        sa.Column("number", sa.Integer, primary_key=True),
        *_required(sa.Double, "weight"),
        sa.ForeignKeyConstraint(version, [f"versions.{column}" for column in version], ondelete="CASCADE"),
    )
    op.create_table(
        "history",
        *_name(),
        sa.Column("position", sa.Integer, primary_key=True),
        *_required(sa.Text, "split"),
        sa.ForeignKeyConstraint(key, of_name, ondelete="CASCADE"),
    )
    op.create_table("retired", sa.Column("digest", sa.Text, primary_key=True), *_required(sa.Double, "at"))
    name = sa.Column("name", sa.Text, primary_key=True)
    counters = op.create_table("counters", name, *_required(sa.BigInteger, "value"))
    op.bulk_insert(counters, [{"name": "revision", "value": 0}])
