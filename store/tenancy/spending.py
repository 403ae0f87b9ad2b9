"""Spending of tenants and keys in the present periods of their budgets: a row for each budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select

from store.tenancy.ledger import insert_of
from store.tenancy.tables import ledger, spending

_DAY_S = 86_400
# Parameters of one statement are limited.
_AT_ONCE = 500


class SpendBudget(NamedTuple):
    """A budget's owner and period: of a tenant, or of a key; ``duration`` is empty without one.

    ``begin`` is the Unix second in which the period began.
    """

    name: str
    is_key: bool
    duration: str
    begin: int

    @property
    def owner(self) -> str:
        return f"{'key' if self.is_key else 'tenant'} {self.name}"


def read(connection: Connection, budgets: Sequence[SpendBudget]) -> dict[SpendBudget, int]:
    """What was spent of ``budgets``, in nano-units; those of which nothing is noted are left out."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    owners = [budget.owner for budget in budgets]
    for i in range(0, len(owners), _AT_ONCE):
        for row in connection.execute(select(spending).where(spending.c.owner.in_(owners[i : i + _AT_ONCE]))):
            found[row.owner, row.duration] = row.begin, row.cost_nano
    spent = {}
    for budget in budgets:
        begin, nano = found.get((budget.owner, budget.duration), (-1, 0))
        # Another host may already be in the next period; this one's is over then.
        if begin >= budget.begin:
            spent[budget] = nano
    return spent


def note(connection: Connection, budgets: Iterable[SpendBudget]) -> None:
    """Note ``budgets`` of which nothing is noted; in an exclusive transaction."""
    add(connection, dict.fromkeys(budgets, 0))


def add(connection: Connection, costs: Mapping[SpendBudget, int]) -> None:
    """Add ``costs`` in nano-units, before the ledger has them; in an exclusive transaction.

    A budget that is noted for the first time starts with what the ledger has since the day when its period
    began; one whose periods are no whole days starts with nothing.
    """
    budgets = list(costs)
    known = read(connection, budgets)
    insert: Any = insert_of(connection)(spending)
    statement = insert.on_conflict_do_update(
        index_elements=["owner", "duration"],
        set_={name: insert.excluded[name] for name in ("begin", "cost_nano")},
        where=spending.c.begin <= insert.excluded.begin,
    )
    rows = []
    for budget in budgets:
        before = known[budget] if budget in known else _of_ledger(connection, budget)
        nano = before + costs[budget]
        names = {"owner": budget.owner, "duration": budget.duration, "begin": budget.begin}
        rows.append({**names, "cost_nano": nano})
    if rows:
        connection.execute(statement, rows)


def _of_ledger(connection: Connection, budget: SpendBudget) -> int:
    if budget.begin % _DAY_S:
        return 0
    whose = ledger.c.key_id if budget.is_key else ledger.c.tenant
    since = datetime.fromtimestamp(budget.begin, UTC).date().isoformat()
    query = select(func.coalesce(func.sum(ledger.c.cost_nano), 0)).where(
        whose == budget.name, ledger.c.day >= since
    )
    return int(connection.execute(query).scalar_one())
