"""Workers know what is spent of a budget: by their host at once, and by others as the ledger has it."""

from __future__ import annotations

import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from gateway.accounting.budgets import Budgets, SpentBudgets
from gateway.accounting.ledger_writer import LedgerWriter
from gateway.intake.shared_limits import ACCOUNTING, SharedLimits
from gateway.intake.usage_journal import UsageCharge, UsageJournal
from gateway.protocol.usage import TokenUsage
from gateway.telemetry.structured_log import StructuredLog
from policy.config.tenancy import TokenPrice
from policy.hashing import hash_name
from policy.tenancy.price import rates_of
from policy.wire.access_snapshot import KeyRow
from policy.wire.accounting_api import KEYS, TENANTS, USAGE
from store.database import Database
from store.tenancy import ledger, spending
from store.tenancy.ledger import LedgerKey, UsageTotals
from store.tenancy.spending import SpendBudget
from tests.clock import Clock
from tests.gateway.accounting.site import DECLARED, AccountingSite

RATES = rates_of(TokenPrice(input=0, output=1.0))


async def test_a_host_knows_what_others_spent_and_counts_its_own_once(tmp_path: Path) -> None:
    clock = Clock(time.time())
    site = AccountingSite(tmp_path, f"sqlite:///{tmp_path / 't.db'}", clock)
    await site.ask("POST", TENANTS, {"name": "t", "max_budget": 1.0, "budget_duration": "1d"})
    journal = UsageJournal(tmp_path / "usage", StructuredLog(0, StringIO()))
    budgets = Budgets(site.access)
    writer = LedgerWriter(site.database.get, tmp_path / "usage", "here", budgets=budgets.of)
    limits = SharedLimits(tmp_path / "limits", ACCOUNTING)
    spent = SpentBudgets(budgets, limits, site.database.get)
    worker = SharedLimits(tmp_path / "limits", 0)
    slot = worker.open(hash_name("tenant t"), counts=True)

    def spend(tokens: int) -> None:
        charge = UsageCharge(journal, "t", "", "m", "", RATES, 0)
        charge.begin()
        charge.end(TokenUsage(0, 0, tokens))
        slot.spent += charge.cost_nano
        slot.asked_at = time.monotonic_ns()
        worker.write(slot)

    def known(day: float) -> tuple[int, bool]:
        """What the worker knows to be spent of the budget, and whether its period ends in a day or less."""
        worker.look(slot)
        elsewhere = worker.spent_elsewhere(slot)
        assert elsewhere is not None
        return slot.all_spent + elsewhere[0], day < elsewhere[1] <= day + 86_400

    def turn(then_spend: int = 0) -> None:
        spent._looked_at = 0.0
        budgets.update()
        spent.look()
        if then_spend:
            spend(then_spend)
        writer.drain()
        spent.publish()

    with site.database.get().writing() as connection:
        elsewhere = UsageTotals()
        elsewhere.cost_nano = 7000
        ledger.add(
            connection, {LedgerKey(time.strftime("%Y-%m-%d", time.gmtime()), "t", "", "m", ""): elsewhere}
        )
    spend(1)
    turn()
    assert known(clock()) == (8000, True)
    spend(2)
    assert known(clock()) == (10_000, True), "at once, before the ledger has it"
    turn(then_spend=10)
    assert known(clock()) == (30_000, True), "twice for a moment rather than not at all"
    turn()
    assert known(clock()) == (20_000, True)
    clock.now += 86_400
    turn()
    assert known(clock()) == (0, True), "the next day begins with nothing"
    site.database.close()


@pytest.mark.parametrize("between", [None, {"max_budget": 1.0, "budget_duration": "1d"}])
@pytest.mark.parametrize("declared", [False, True])
async def test_a_budget_that_is_set_again_has_what_was_spent_meanwhile(
    tmp_path: Path, between: dict[str, Any] | None, declared: bool
) -> None:
    site = AccountingSite(tmp_path, f"sqlite:///{tmp_path / 't.db'}", Clock(time.time()))
    monthly = {"max_budget": 1.0, "budget_duration": "1mo"}
    hosts = []
    for name in ("a", "b"):
        budgets = Budgets(site.access)
        budgets.update()
        journal = UsageJournal(tmp_path / name, StructuredLog(0, StringIO()))
        writer = LedgerWriter(site.database.get, tmp_path / name, name, budgets=budgets.of)
        hosts.append((budgets, journal, writer))
    if not declared:
        await site.ask("POST", TENANTS, {"name": "t"})

    async def spend(budget: dict[str, Any] | None, tokens: int) -> dict[SpendBudget, int]:
        """Spend on both hosts when the one knows of the change, and again when the other does."""
        if declared:
            site.declare(tenants=[{"name": "t", "keys_sha256": [DECLARED], **(budget or {})}])
        else:
            unset = {"max_budget": None, "budget_duration": None}
            await site.ask("PATCH", f"{TENANTS}/t", unset | (budget or {}))
        for budgets, _, _ in hosts:
            budgets.update()
            for _, journal, writer in hosts:
                charge = UsageCharge(journal, "t", "", "m", "", RATES, 0)
                charge.begin()
                charge.end(TokenUsage(0, 0, tokens))
                writer.drain()
        present = list(hosts[0][0].every())
        with site.database.get().writing() as connection:
            spending.note(connection, present)
            return spending.read(connection, present)

    assert list((await spend(monthly, 5)).values()) == [20_000]
    await spend(between, 100)
    assert list((await spend(monthly, 1)).values()) == [424_000]
    site.database.close()


async def test_keys_that_replaced_each_other_have_one_budget(tmp_path: Path) -> None:
    site = AccountingSite(tmp_path, f"sqlite:///{tmp_path / 't.db'}", Clock(time.time()))
    await site.ask("POST", TENANTS, {"name": "t"})
    first = (await site.ask("POST", KEYS, {"tenant": "t", "max_budget": 1.0}))["view"]["id"]
    journal = UsageJournal(tmp_path / "usage", StructuredLog(0, StringIO()))
    budgets = Budgets(site.access)
    writer = LedgerWriter(site.database.get, tmp_path / "usage", "here", budgets=budgets.of)

    def spend(key: str, tokens: int) -> None:
        charge = UsageCharge(journal, "t", key, "m", "", RATES, 0)
        charge.begin()
        charge.end(TokenUsage(0, 0, tokens))
        budgets.update()
        writer.drain()

    async def rotate(key: str, grace_s: float) -> str:
        rotated = await site.ask("POST", f"{KEYS}/{key}/rotate", {"grace_s": grace_s})
        return str(rotated["view"]["id"])

    spend(first, 1)
    second = await rotate(first, 60.0)
    spend(first, 10)
    spend(second, 100)
    third = await rotate(second, 0.0)
    spend(second, 1000)  # it ran when its key ended
    spend(third, 10_000)
    budget = SpendBudget(first, True, "", 0)
    with site.database.get().writing() as connection:
        assert list(budgets.every()) == [budget]
        assert spending.read(connection, [budget]) == {budget: 11_111_000}
        spending.recount(connection, [(budget.owner, budget.duration)])
        spending.note(connection, [budget])
        assert spending.read(connection, [budget]) == {budget: 11_111_000}, "the ledger says the same"
    rows = {row.id: row.first_id for row in site.file() if isinstance(row, KeyRow)}
    assert rows == {first: None, third: first}
    site.database.close()


def test_a_clock_that_was_ahead_keeps_nothing_from_being_counted(tmp_path: Path, database_url: str) -> None:
    database = Database(database_url)
    hour = int(time.time()) // 3600
    now, *ahead = (SpendBudget("t", False, "1h", (hour + hours) * 3600) for hours in (0, 240, 241, 242))
    # Of a month ago, as the database's clock has it.
    former = [SpendBudget("t", False, "1h", (hour - 720 + hours) * 3600) for hours in range(3)]
    with database.writing() as connection:
        spending.add(connection, {now: 1})
        for budget in ahead:
            spending.note(connection, [budget])
        spending.add(connection, {now: 10})
        spending.add(connection, {ahead[2]: 5})
        assert spending.read(connection, [now, ahead[2]]) == {now: 11, ahead[2]: 5}
        for budget in former:
            spending.add(connection, {budget: 1})
        assert spending.read(connection, former) == dict.fromkeys(former[1:], 1), "those before the last go"
    database.close()


@pytest.mark.parametrize(
    ("query", "expected"),
    [("by=colour", "by"), ("by=day,day", "by"), ("since=yesterday", "since"), ("until=2026-1-1", "until")],
)
async def test_a_wrong_question_about_usage_is_refused(tmp_path: Path, query: str, expected: str) -> None:
    site = AccountingSite(tmp_path, f"sqlite:///{tmp_path / 't.db'}", Clock())
    assert await site.ask("GET", f"{USAGE}?by=key,day&tenant=t") == []
    problem = (await site.ask("GET", f"{USAGE}?{query}", status=400))["error"]
    assert problem["path"] == expected
    site.database.close()
