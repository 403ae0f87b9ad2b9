"""Spending of tenants and keys in the periods of their budgets: a row for each budget and period.

A host's clock may be ahead: what it spends in a period to come is beside that of the present one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, delete, func, or_, select

from policy.tenancy.budget_period import period_of
from store.tenancy import limit_leases
from store.tenancy.ledger import insert_of
from store.tenancy.tables import api_keys, ledger, spending

_DAY_S = 86_400
# Parameters of one statement are limited.
_AT_ONCE = 500


class SpendBudget(NamedTuple):
    """A budget's owner and period: of a tenant, or of a key; ``duration`` is empty without one.

    A key's ``name`` is the id of the first of those that replaced each other, which have one budget.
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
    found: dict[tuple[str, str, int], int] = {}
    owners = [budget.owner for budget in budgets]
    for i in range(0, len(owners), _AT_ONCE):
        for row in connection.execute(select(spending).where(spending.c.owner.in_(owners[i : i + _AT_ONCE]))):
            found[row.owner, row.duration, row.begin] = row.cost_nano
    spent = {}
    for budget in budgets:
        nano = found.get((budget.owner, budget.duration, budget.begin))
        if nano is not None:
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
        index_elements=["owner", "duration", "begin"], set_={"cost_nano": insert.excluded.cost_nano}
    )
    rows = []
    for budget in budgets:
        before = known[budget] if budget in known else _of_ledger(connection, budget)
        nano = before + costs[budget]
        names = {"owner": budget.owner, "duration": budget.duration, "begin": budget.begin}
        rows.append({**names, "cost_nano": nano})
    if rows:
        connection.execute(statement, rows)
    if begun := [budget for budget in budgets if budget.duration and budget not in known]:
        _forget_former(connection, begun)


def recountable(connection: Connection) -> set[tuple[str, str]]:
    """The owners and durations of what is noted of periods that began at midnight: the ledger has it too."""
    query = select(spending.c.owner, spending.c.duration).where(spending.c.begin % _DAY_S == 0).distinct()
    return {(row.owner, row.duration) for row in connection.execute(query)}


def recount(connection: Connection, budgets: Iterable[tuple[str, str]]) -> None:
    """Forget of these what is :func:`recountable`: the ledger says it when it is asked for the next time."""
    statement = delete(spending).where(
        spending.c.owner == bindparam("of"),
        spending.c.duration == bindparam("lasting"),
        spending.c.begin % _DAY_S == 0,
    )
    connection.execute(statement, [{"of": owner, "lasting": duration} for owner, duration in budgets])


def _forget_former(connection: Connection, begun: Iterable[SpendBudget]) -> None:
    """Delete the rows of periods before the last ones of ``begun``, whose periods have just begun.

    The database's clock counts where a host's is ahead of it: other hosts are in the present period.
    """
    now = limit_leases.now(connection)
    statement = delete(spending).where(
        spending.c.owner == bindparam("of"),
        spending.c.duration == bindparam("lasting"),
        spending.c.begin < bindparam("last"),
    )
    rows = []
    for budget in begun:
        present = period_of(budget.duration, min(float(budget.begin), now))
        last = period_of(budget.duration, present.begin - 1.0)
        rows.append({"of": budget.owner, "lasting": budget.duration, "last": int(last.begin)})
    connection.execute(statement, rows)


def _of_ledger(connection: Connection, budget: SpendBudget) -> int:
    if budget.begin % _DAY_S:
        return 0
    whose = ledger.c.tenant == budget.name
    if budget.is_key:
        replacing = select(api_keys.c.id).where(api_keys.c.first_id == budget.name)
        whose = or_(ledger.c.key_id == budget.name, ledger.c.key_id.in_(replacing))
    since = datetime.fromtimestamp(budget.begin, UTC).date().isoformat()
    query = select(func.coalesce(func.sum(ledger.c.cost_nano), 0)).where(whose, ledger.c.day >= since)
    return int(connection.execute(query).scalar_one())
