"""A row of spending for each period: one in the future kept the present one from being counted."""

import sqlalchemy as sa
from alembic import op

from store.database import key_columns, required_columns

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Make the table anew, with the rows that it has: SQLite can change no primary key."""
    rows = op.get_bind().execute(sa.text("SELECT * FROM spending")).mappings().all()
    op.drop_table("spending")
    made = op.create_table(
        "spending",
        *key_columns(sa.Text, "owner", "duration"),
        *key_columns(sa.BigInteger, "begin"),
        *required_columns(sa.BigInteger, "cost_nano"),
    )
    op.bulk_insert(made, [dict(row) for row in rows])
