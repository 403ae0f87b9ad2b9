"""``explain``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import click
import msgspec

from policy.decision import Decision
from serve.client import ControllerClient, Logged
from store.state import StateDir
from tidegate.commands.console import console
from tidegate.commands.explanation import explained
from tidegate.commands.targets import controller
from tidegate.commands.times import clock, moment
from tidegate.exits import Exit

# How many decisions back a change is looked for.
LOOKED_AT = 200
# Of decisions that are alike one a minute is logged: so long after one comes the next.
NEXT_S = 61.0


@click.command(
    help="Say why MODEL has the replicas that it has: what was seen, what each policy asked for, what clipped"
    " it.\n\nWithout an option: the decision that changed something last, and the present one."
)
@click.argument("model", required=False)
@click.option("--last", type=click.IntRange(1, LOOKED_AT), metavar="N", help="The last N decisions.")
@click.option("--at", metavar="TIME", type=moment, help="As of then: 12:03, 12:03:20, ISO, or '5m ago'.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def explain(state: StateDir, model: str | None, last: int | None, at: float | None, as_json: bool) -> None:
    if last is not None and at is not None:
        raise click.UsageError("--last counts from now: it goes without --at")
    client = controller(state)
    names = [model] if model else [each.name for each in client.status().models]
    found = {name: _chosen(client, name, last, at) for name in names}
    chosen = [told for some in found.values() for told in some]
    if as_json:
        click.echo(msgspec.json.encode({"decisions": [told.logged for told in chosen]}).decode())
    else:
        _print(chosen, time.time())
    if lacking := [name for name, some in found.items() if not some]:
        when = "" if at is None else f" from before {clock(at, time.time())}"
        click.echo(f"tidegate: no decision on {', '.join(lacking)}{when} is known", err=True)
        sys.exit(Exit.FAILED)


class _Told(NamedTuple):
    """A decision, and the one after it, which shows whether it was carried out."""

    logged: Logged
    later: Decision | None


def _chosen(client: ControllerClient, model: str, last: int | None, at: float | None) -> list[_Told]:
    """The decisions to explain, oldest first."""
    until = None if at is None else at + NEXT_S
    found = client.decisions(model, last=LOOKED_AT if last is None else last, at=until)
    told = [
        _Told(each, found[i - 1].decision if i else None)
        for i, each in enumerate(found)
        if at is None or each.decision.at <= at
    ]
    if last is None:
        change = next((each for each in told if each.logged.decision.changes), None)
        told = told[:1] if change is None or change is told[0] else [told[0], change]
    return told[::-1]


def _print(chosen: Sequence[_Told], now: float) -> None:
    out = console()
    for i, told in enumerate(chosen):
        if i:
            out.print()
        out.print(explained(told.logged.situation, told.logged.decision, told.later, now))
