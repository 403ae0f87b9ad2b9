"""The tables of the lease, and of the state of the controller that leads."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Double, LargeBinary, Table, Text

from store.database import key_columns, metadata, required_columns

# The counter of the highest term whose leader has used the state.
TERM = "controller_term"
# The only row of the lease.
CONTROLLER = "controller"

# The fields of :class:`policy.leader_election.LeaderLease`.
leases = Table(
    "controller_lease",
    metadata,
    *key_columns(Text, "name"),
    *required_columns(Text, "holder", "address"),
    *required_columns(BigInteger, "term", "renewals"),
    *required_columns(Boolean, "released"),
    *required_columns(Double, "lease_s", "acquired_at", "renewed_at"),
)
# Files of the state directory by name: JSON.
state = Table(
    "controller_state", metadata, *key_columns(Text, "name"), *required_columns(LargeBinary, "value")
)
