"""``explain``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import click
import msgspec

from policy.scaling.situation import Decision
from serve.controller.client import ControllerClient
from serve.controller_api import LoggedDecision
from store.state_dir import StateDir
from tidegate.commands.durations import clock, moment
from tidegate.commands.fleet.explain_view import Aftermath, render_decision
from tidegate.commands.fleet.scale_mode import controller_client
from tidegate.commands.terminal import console
from tidegate.exit_codes import Exit

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
    client = controller_client(state)
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
    """A decision, and what was aimed for after it, which shows whether it was carried out."""

    logged: LoggedDecision
    after: Aftermath | None


def _chosen(client: ControllerClient, model: str, last: int | None, at: float | None) -> list[_Told]:
    """The decisions to explain, oldest first."""
    until = None if at is None else at + NEXT_S
    found = client.decisions(model, last=LOOKED_AT if last is None else last, at=until)
    newest = _aimed(client, model) if at is None else None
    told = [
        _Told(each, _before(found[i - 1].decision) if i else newest)
        for i, each in enumerate(found)
        if at is None or each.decision.at <= at
    ]
    if last is None:
        change = next((each for each in told if each.logged.decision.changes), None)
        told = told[:1] if change is None or change is told[0] else [told[0], change]
    return told[::-1]


def _before(decision: Decision) -> Aftermath:
    """What was aimed for when the next decision was made."""
    return Aftermath(decision.was_mode, decision.was_count)


def _aimed(client: ControllerClient, model: str) -> Aftermath | None:
    """What is aimed for now."""
    now = next((each for each in client.status().models if each.name == model), None)
    return Aftermath(now.mode, now.target, now.phase, now.barred) if now is not None else None


def _print(chosen: Sequence[_Told], now: float) -> None:
    out = console()
    for i, told in enumerate(chosen):
        if i:
            out.print()
        out.print(render_decision(told.logged, told.after, now))
