"""Tables of the controllers' lease and of the leader's state; the highest term starts at 0."""

import sqlalchemy as sa
from alembic import op

from store.database import key_columns, required_columns

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the tables and the counter of terms."""
    op.create_table(
        "controller_lease",
        *key_columns(sa.Text, "name"),
        *required_columns(sa.Text, "holder", "address"),
        *required_columns(sa.BigInteger, "term", "renewals"),
        *required_columns(sa.Boolean, "released"),
        *required_columns(sa.Double, "lease_s", "acquired_at", "renewed_at"),
    )
    op.create_table(
        "controller_state", *key_columns(sa.Text, "name"), *required_columns(sa.LargeBinary, "value")
    )
    name, value = sa.column("name", sa.Text), sa.column("value", sa.BigInteger)
    op.bulk_insert(sa.table("counters", name, value), [{"name": "controller_term", "value": 0}])
