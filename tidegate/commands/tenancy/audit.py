"""``audit``: who changed what, and when."""

from __future__ import annotations

import time

import click
import msgspec

from gateway.accounting.cli_client import AccountingClient
from policy.wire.accounting_api import AUDIT, AuditEntry
from policy.wire.controller import with_query
from store.state_dir import StateDir
from tidegate.commands.options import as_json
from tidegate.commands.terminal import print_list
from tidegate.commands.units import beginning, clock


@click.command(help="Show the last changes of tenants, keys and the deployment: who, what, before and after.")
@click.option("--last", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many.")
@click.option("--actor", help="Only by this one, such as 'user root'.")
@click.option("--target", help="Only of this one: a tenant, a key's id, a model.")
@click.option("--action", help="Only actions that begin so, such as key. or scale.")
@click.option(
    "--since", metavar="TIME", type=beginning, help="From this time on: 12:03, 2026-03-01T12:03 or '5m ago'."
)
@as_json
@click.pass_obj
def audit(  # noqa: PLR0917 - click passes them by name
    state: StateDir,
    last: int,
    actor: str | None,
    target: str | None,
    action: str | None,
    since: float | None,
    as_json: bool,
) -> None:
    path = with_query(AUDIT, last=last, actor=actor, target=target, action=action, since=since)
    entries = AccountingClient(state).ask("GET", path, answer=list[AuditEntry])
    now = time.time()
    columns = (
        ("when", lambda entry: clock(entry.at, now)),
        ("who", lambda entry: f"{entry.actor} ({entry.role})"),
        ("action", lambda entry: entry.action),
        ("target", lambda entry: entry.target),
        ("change", _change),
    )
    print_list("entries", entries, columns, as_json=as_json)


def _change(entry: AuditEntry) -> str:
    """What became different, as ``name: before -> after``."""
    before, after = entry.before, entry.after
    if not isinstance(before, dict | None) or not isinstance(after, dict | None):
        return f"{_text(before)} -> {_text(after)}"
    names = {**(before or {}), **(after or {})}
    changes = []
    for name in names:
        was, becomes = (before or {}).get(name), (after or {}).get(name)
        if was != becomes:
            first = "" if before is None else f"{_text(was)} -> "
            changes.append(f"{name}: {first}{_text(becomes)}")
    return ", ".join(changes) or "-"


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
