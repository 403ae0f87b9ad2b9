"""``usage``: what tenants used, and what it costs."""

from __future__ import annotations

import csv
import sys
from datetime import datetime
from typing import Any

import click

from gateway.accounting.cli_client import AccountingClient
from policy.wire.accounting_api import USAGE
from policy.wire.controller import with_query
from policy.wire.usage_query import UsageBy, UsageRow
from store.state_dir import StateDir
from tidegate.commands.options import CommaSeparated, as_json
from tidegate.commands.terminal import console, print_json, table_of_rows

_SUMS = (
    "requests", "prompt_tokens", "cached_tokens", "output_tokens", "estimated", "interrupted", "cost",
    "joules",
)  # fmt: skip
_DAY = click.DateTime(["%Y-%m-%d"])


@click.command(help="Show the requests, tokens and cost of tenants, from the ledger.")
@click.option(
    "--by",
    type=CommaSeparated("list", UsageBy, f"some of {', '.join(UsageBy)}"),
    default=(UsageBy.TENANT,),
    show_default="tenant",
    help="What to sum by, separated by commas: day, tenant, key, model, adapter.",
)
@click.option("--tenant", help="Only this tenant's; '' for requests without a key.")
@click.option("--since", type=_DAY, help="The first day, in UTC.")
@click.option("--until", type=_DAY, help="The last day, in UTC.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@as_json
@click.pass_obj
def usage(  # noqa: PLR0917 - click passes them by name
    state: StateDir,
    by: tuple[UsageBy, ...],
    tenant: str | None,
    since: datetime | None,
    until: datetime | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    path = with_query(USAGE, by=",".join(by), tenant=tenant, since=_text(since), until=_text(until))
    rows = AccountingClient(state).ask("GET", path, answer=list[UsageRow])
    total = UsageRow(**{name: _sum([getattr(row, name) for row in rows]) for name in _SUMS})
    if as_json:
        print_json({"usage": rows, "total": total})
        return
    # Without a measured watt the column would be zeros.
    sums = [name for name in _SUMS if name != "joules" or total.joules]
    cells = [[getattr(row, name) for name in (*by, *sums)] for row in rows]
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([*by, *sums])
        writer.writerows(cells)
        return
    cells.append(["total", *[""] * (len(by) - 1), *(getattr(total, name) for name in sums)])
    heads = [*by, *(f">{name.replace('_', ' ')}" for name in sums)]
    console().print(table_of_rows(heads, [[_cell(value) for value in row] for row in cells]))


def _sum(values: list[Any]) -> Any:
    """Of integers, or of money in multiples of 1e-9 (joules are less exact)."""
    total = sum(values)
    return round(total, 9) if isinstance(total, float) else total


def _text(day: datetime | None) -> str | None:
    return None if day is None else day.date().isoformat()


def _cell(value: object) -> str:
    return (
        f"{value:,.4f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
