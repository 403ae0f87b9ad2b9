"""Tables of adapters: names, versions, the current split of each name, and its former splits."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _name() -> list[sa.Column[str]]:
    return [sa.Column("model", sa.Text, primary_key=True), sa.Column("name", sa.Text, primary_key=True)]


def _of_name() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["model", "name"], ["aliases.model", "aliases.name"], ondelete="CASCADE")


def upgrade() -> None:
    """Create the tables; the revision counter starts at 0."""
    op.create_table(
        "aliases",
        *_name(),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("tenants", sa.Text, nullable=False),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("declared", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
    op.create_table(
        "versions",
        *_name(),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("digest", sa.Text, nullable=False, index=True),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        _of_name(),
        sa.UniqueConstraint("model", "name", "digest"),
    )
    op.create_table(
        "splits",
        *_name(),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("weight", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(
            ["model", "name", "number"],
            ["versions.model", "versions.name", "versions.number"],
            ondelete="CASCADE",
        ),
    )
    op.create_table(
        "history",
        *_name(),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("split", sa.Text, nullable=False),
        _of_name(),
    )
    op.create_table(
        "retired",
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
    )
    counters = op.create_table(
        "counters",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(counters, [{"name": "revision", "value": 0}])
