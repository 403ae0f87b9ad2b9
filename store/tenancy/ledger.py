"""The ledger: usage by day, tenant, key, model and adapter, in tokens and money."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, Insert, Select, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from store.tenancy.tables import ledger, ledger_segments

COUNTS = (
    "requests", "prompt_tokens", "cached_tokens", "output_tokens", "interrupted", "estimated", "cost_nano",
    "joules",
)  # fmt: skip


class LedgerKey(NamedTuple):
    """What usage is summed by; ``day`` is a UTC date (2026-01-31)."""

    day: str
    tenant: str
    key_id: str
    model: str
    adapter: str


class UsageTotals:
    """Sums of usage; ``prompt_tokens`` include those that were cached, ``cost_nano`` is money in 1e-9."""

    __slots__ = COUNTS

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.interrupted = self.estimated = self.cost_nano = 0
        self.joules = 0.0


def add(connection: Connection, sums: Mapping[LedgerKey, UsageTotals]) -> None:
    """Add ``sums`` to the ledger."""
    insert: Any = insert_of(connection)(ledger)
    added = {name: ledger.c[name] + insert.excluded[name] for name in COUNTS}
    statement = insert.on_conflict_do_update(index_elements=list(LedgerKey._fields), set_=added)
    rows = [
        {**key._asdict(), **{name: getattr(counts, name) for name in COUNTS}} for key, counts in sums.items()
    ]
    if rows:
        connection.execute(statement, rows)


def drained(connection: Connection, host: str, segment: str) -> bytes:
    """Which slots of a host's segment are in the ledger, a bit each; empty if none is."""
    ours = (ledger_segments.c.host == host) & (ledger_segments.c.segment == segment)
    found = connection.execute(select(ledger_segments.c.bitmap).where(ours)).scalar_one_or_none()
    return b"" if found is None else bytes(found)


def set_drained(connection: Connection, host: str, segment: str, bitmap: bytes) -> None:
    """Note which slots of a segment are in the ledger now."""
    insert: Any = insert_of(connection)(ledger_segments)
    statement = insert.on_conflict_do_update(
        index_elements=["segment", "host"], set_={"bitmap": insert.excluded.bitmap}
    )
    connection.execute(statement, {"segment": segment, "host": host, "bitmap": bitmap})


def forget_segments(connection: Connection, host: str, kept: Collection[str]) -> None:
    """Delete the notes on a host's segments whose files are gone: all but ``kept``."""
    gone = (ledger_segments.c.host == host) & ledger_segments.c.segment.not_in(kept)
    connection.execute(delete(ledger_segments).where(gone))


def usage(
    connection: Connection,
    by: Collection[str],
    *,
    tenant: str | None = None,
    since: str | None = None,
    until: str | None = None,
) -> list[dict[str, Any]]:
    """The sums for each value of the columns ``by``, from the day ``since`` to ``until``, both included."""
    columns = [ledger.c[name] for name in by]
    sums = [func.coalesce(func.sum(ledger.c[name]), 0).label(name) for name in COUNTS]
    query: Select[Any] = select(*columns, *sums).group_by(*columns).order_by(*columns)
    if tenant is not None:
        query = query.where(ledger.c.tenant == tenant)
    if since is not None:
        query = query.where(ledger.c.day >= since)
    if until is not None:
        query = query.where(ledger.c.day <= until)
    # PostgreSQL sums integers into decimal numbers.
    return [
        {name: _plain(name, value) for name, value in row._mapping.items()}
        for row in connection.execute(query)
    ]


def _plain(name: str, value: Any) -> Any:
    if name == "joules":
        return float(value)
    return int(value) if name in COUNTS else value


def insert_of(connection: Connection) -> type[Insert]:
    """The dialect's INSERT, which can update a row that exists."""
    return postgresql.Insert if connection.dialect.name == "postgresql" else sqlite.Insert
