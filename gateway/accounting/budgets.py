"""Budgets of tenants and keys: which there are, and what is spent of them in their present periods.

They are in the database and in the deployment file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic

from gateway.accounting.access_transaction import AccessDatabase
from gateway.accounting.deployment_file_snapshot import DeploymentFileSnapshot
from gateway.intake.shared_limits import SharedLimits
from policy.config.tenancy import AccessPolicy
from policy.errors import ConfigError
from policy.hashing import hash_name
from policy.tenancy.budget_period import BudgetPeriod, period_of
from store.database import Database, counter
from store.tenancy import spending
from store.tenancy.keys import every_key, first_keys
from store.tenancy.spending import SpendBudget
from store.tenancy.tables import REVISION
from store.tenancy.tenants import every_tenant

# Budgets that were asked for lately are told, each second.
EVERY_S = 1.0
LATELY_S = 60.0


class Budgets:
    """The budgets as they were at the last :meth:`update`."""

    def __init__(self, access: AccessDatabase) -> None:
        self._access = access
        self._revision = -1
        self._read_at = 0.0
        self._declared: DeploymentFileSnapshot | None = None
        self._tenants: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self._first_keys: dict[str, str] = {}
        self._periods: dict[str, BudgetPeriod] = {}

    def update(self) -> None:
        """Read them again if any may have changed; raises :class:`policy.errors.TidegateError`.

        While the deployment file is invalid, the former ones stay.
        """
        try:
            declared = self._access.declared
        except ConfigError:
            if self._declared is None:
                raise
            return
        with self._access.reading() as connection:
            revision = counter(connection, REVISION)
            now = self._access.now()
            # Of a clock that was set back, keys may be missing that had ended by it.
            if revision == self._revision and declared is self._declared and now >= self._read_at:
                return
            tenants = {each.tenant.name: each.tenant for each in every_tenant(connection)}
            keys = every_key(connection, valid_at=now)
            replacing = first_keys(connection)
            recountable = spending.recountable(connection)
        by_tenant = _durations(tenants | declared.tenants)
        by_key = _durations({key.first_id or key.id: key.access for key in keys})
        counted = _budgets(by_tenant, by_key)
        if self._declared is not None:
            counted &= _budgets(self._tenants, self._keys)
        # While a budget is not set, what its owner spends is in the ledger alone.
        if uncounted := recountable - counted:
            self._access.recount_spending(uncounted)
        self._tenants, self._keys, self._first_keys = by_tenant, by_key, replacing
        self._revision, self._declared, self._read_at = revision, declared, now

    def of(self, tenant: str, key: str, at: float) -> list[SpendBudget]:
        """The budgets that pay for a request of the instant ``at``, where its period is the present one."""
        found = []
        # Requests of a key that was replaced may come here after it ended.
        key = self._first_keys.get(key, key)
        for name, is_key, durations in ((tenant, False, self._tenants), (key, True, self._keys)):
            if (duration := durations.get(name)) is not None:
                begin = self._period(duration).begin
                if begin <= at:
                    found.append(SpendBudget(name, is_key, duration, int(begin)))
        return found

    def every(self) -> dict[SpendBudget, float]:
        """All budgets in their present periods, with the ends of these."""
        found = {}
        for is_key, durations in ((False, self._tenants), (True, self._keys)):
            for name, duration in durations.items():
                period = self._period(duration)
                found[SpendBudget(name, is_key, duration, int(period.begin))] = period.end
        return found

    def _period(self, duration: str) -> BudgetPeriod:
        now = self._access.now()
        period = self._periods.get(duration)
        if period is None or not period.begin <= now < period.end:
            period = self._periods[duration] = period_of(duration or None, now)
        return period


class SpentBudgets:
    """Tells the workers of this host what is spent of the budgets that they ask for, as the ledger knows.

    :meth:`look` is called before the ledger is written, :meth:`publish` after it.
    """

    def __init__(self, budgets: Budgets, limits: SharedLimits, database: Callable[[], Database]) -> None:
        self._budgets = budgets
        self._limits = limits
        self._database = database
        self._looked_at = 0.0
        # What the host's workers had spent, and when the period ends.
        self._looked: dict[SpendBudget, tuple[int, float]] = {}

    def look(self) -> None:
        """Note what this host's workers have spent: at least that is in the ledger when it is written."""
        now = monotonic()
        self._looked = {}
        if now < self._looked_at + EVERY_S:
            return
        self._looked_at = now
        ends = self._budgets.every()
        if not ends:
            return
        asked = self._limits.asked()
        for budget, end in ends.items():
            key = hash_name(budget.owner)
            if key in asked and asked[key][1] > now - LATELY_S:
                self._looked[budget] = self._limits.spent_by_host(key), end

    def publish(self) -> None:
        """Publish what the ledger has; raises :class:`policy.errors.Unreachable`."""
        looked = list(self._looked)
        if not looked:
            return
        with self._database().reading() as connection:
            spent = spending.read(connection, looked)
        if unknown := [budget for budget in looked if budget not in spent]:
            with self._database().writing() as connection:
                spending.note(connection, unknown)
                spent |= spending.read(connection, unknown)
        for budget, (by_host, end) in self._looked.items():
            self._limits.publish_spent(hash_name(budget.owner), spent[budget], by_host, end)


def _budgets(tenants: Mapping[str, str], keys: Mapping[str, str]) -> set[tuple[str, str]]:
    """The owners and durations of budgets."""
    return {
        (SpendBudget(name, is_key, duration, 0).owner, duration)
        for is_key, durations in ((False, tenants), (True, keys))
        for name, duration in durations.items()
    }


def _durations(owners: Mapping[str, AccessPolicy]) -> dict[str, str]:
    return {
        name: access.budget_duration or "" for name, access in owners.items() if access.max_budget is not None
    }
