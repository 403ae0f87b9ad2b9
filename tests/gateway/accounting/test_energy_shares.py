"""Joules are attributed by tokens, at what one took on all hosts meanwhile."""

from __future__ import annotations

from pathlib import Path

from gateway.accounting.energy_shares import EnergyShares, totals_of
from policy.signals.energy_attribution import BASE, IDLE, OTHERS
from policy.wire.metric_definitions import Samples
from store.database import Database
from store.tenancy import ledger
from store.tenancy.ledger import LedgerKey, UsageTotals


def samples(**by_adapter: tuple[float, float]) -> Samples:
    """Joules and tokens of model m by adapter."""
    return {
        f"tidegate_energy_{name}": [(("m", adapter), each[i]) for adapter, each in by_adapter.items()]
        for i, name in enumerate(("joules", "tokens"))
    }


def used(prompt: int, cached: int, output: int) -> UsageTotals:
    counts = UsageTotals()
    counts.requests, counts.prompt_tokens, counts.cached_tokens, counts.output_tokens = (
        1,
        prompt,
        cached,
        output,
    )
    return counts


def test_a_token_costs_what_all_of_its_model_and_adapter_did(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 't.db'}")
    shares = EnergyShares(lambda: "", "", lambda: database)
    base, sql, rare = (LedgerKey("2026-01-31", "t", "k", "m", name) for name in ("", "sql", "rare"))

    def joules() -> dict[str, float]:
        with database.reading() as connection:
            return {row["adapter"]: row["joules"] for row in ledger.usage(connection, ["adapter"])}

    def pass_on(more: dict[LedgerKey, UsageTotals], **by_adapter: tuple[float, float]) -> None:
        shares.added(more)
        shares.attribute(totals_of(samples(**by_adapter)))

    pass_on({base: used(9, 0, 9)}, **{BASE: (100, 50)})
    assert joules() == {}, "what was before the first figures is unknown"
    # Of 20 tokens on all hosts, half were here; an idle minute is nobody's.
    pass_on({base: used(8, 3, 5)}, **{BASE: (140, 70), IDLE: (7, 0)})
    assert joules() == {"": 20}
    pass_on({base: used(1, 0, 0), sql: used(0, 0, 4)}, **{BASE: (140, 70), "sql": (24, 8)})
    assert joules() == {"": 20, "sql": 12}, "an interval that is not over waits"
    pass_on({rare: used(0, 0, 1)}, **{BASE: (6, 3), OTHERS: (5, 5), "sql": (24, 8)})
    assert joules() == {"": 22, "sql": 12, "rare": 1}, "a new controller counts from 0"
    database.close()
