"""The first of the keys that replaced each other; keys that were replaced before keep limits of their own."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the column."""
    op.add_column("api_keys", sa.Column("first_id", sa.Text))
    op.create_index("ix_api_keys_first_id", "api_keys", ["first_id"])
