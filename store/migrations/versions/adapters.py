"""Adapters: names, their versions, what names stand for, and what they stood for before."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables; the counter begins at 0."""
    op.create_table(
        "aliases",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("tenants", sa.Text, nullable=False),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("declared", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
    op.create_table(
        "versions",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("digest", sa.Text, nullable=False, index=True),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(["model", "name"], ["aliases.model", "aliases.name"], ondelete="CASCADE"),
        sa.UniqueConstraint("model", "name", "digest"),
    )
    op.create_table(
        "splits",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
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
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("split", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["model", "name"], ["aliases.model", "aliases.name"], ondelete="CASCADE"),
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
