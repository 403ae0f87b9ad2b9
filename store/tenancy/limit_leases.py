"""Live hosts and their shares of limits, by the clock of the database."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, select, text

from store.tenancy.ledger import insert_of
from store.tenancy.tables import hosts, limit_leases

_NOW = {
    "postgresql": text("SELECT extract(epoch FROM clock_timestamp())"),
    "sqlite": text("SELECT strftime('%s', 'now')"),
}
# Parameters of one statement are limited.
_AT_ONCE = 500


class LimitLease(NamedTuple):
    """A host's ``share`` of a limit until ``expires``, and its ``demand`` in requests a second."""

    host: str
    share: float
    demand: float
    expires: float


def now(connection: Connection) -> float:
    """The database's clock, in Unix seconds."""
    return float(connection.execute(_NOW[connection.dialect.name]).scalar_one())


def meet(connection: Connection, host: str, at: float, *, lives_s: float) -> list[str]:
    """Note that ``host`` lives; returns all that did so in the last ``lives_s`` seconds."""
    insert: Any = insert_of(connection)(hosts)
    seen = {"seen": insert.excluded.seen}
    connection.execute(
        insert.on_conflict_do_update(index_elements=["host"], set_=seen), {"host": host, "seen": at}
    )
    return list(connection.execute(select(hosts.c.host).where(hosts.c.seen > at - lives_s)).scalars())


def read(connection: Connection, limits: Collection[str], since: float) -> dict[str, list[LimitLease]]:
    """All hosts' leases of ``limits`` that did not end before ``since``."""
    found: dict[str, list[LimitLease]] = {limit: [] for limit in limits}
    wanted = list(limits)
    for i in range(0, len(wanted), _AT_ONCE):
        query = select(limit_leases).where(
            limit_leases.c.limit_id.in_(wanted[i : i + _AT_ONCE]), limit_leases.c.expires > since
        )
        for row in connection.execute(query):
            found[row.limit_id].append(LimitLease(row.host, row.share, row.demand, row.expires))
    return found


def hold(connection: Connection, leases: Mapping[str, LimitLease]) -> None:
    """Write a host's leases by limit, in place of its former ones; in an exclusive transaction."""
    insert: Any = insert_of(connection)(limit_leases)
    statement = insert.on_conflict_do_update(
        index_elements=["limit_id", "host"],
        set_={name: insert.excluded[name] for name in ("share", "demand", "expires")},
    )
    if leases:
        connection.execute(
            statement, [{"limit_id": limit, **lease._asdict()} for limit, lease in leases.items()]
        )


def forget(connection: Connection, before: float) -> None:
    """Delete the leases that ended before, and the hosts that were not seen since."""
    connection.execute(delete(limit_leases).where(limit_leases.c.expires < before))
    connection.execute(delete(hosts).where(hosts.c.seen < before))


def leave(connection: Connection, host: str) -> None:
    """A host ends: its shares are free."""
    connection.execute(delete(limit_leases).where(limit_leases.c.host == host))
    connection.execute(delete(hosts).where(hosts.c.host == host))
