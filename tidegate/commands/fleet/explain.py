"""``explain``: the decisions on a model, from the controller or, if it does not answer, from its log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import click

from policy.errors import Unreachable
from policy.scaling.decision_schedule import LISTEN_S
from policy.scaling.decision_types import Decision
from serve.autoscaler.decision_journal import DecisionJournal
from serve.controller_api_schema import LoggedDecision
from store.state_dir import StateDir
from tidegate.commands.deployment_context import controller_client, stored_deployment
from tidegate.commands.fleet.explain_view import DecisionRollout, render_decision, verdict
from tidegate.commands.options import as_json
from tidegate.commands.terminal import console, print_json, warn
from tidegate.commands.units import clock, moment
from tidegate.exit_codes import ExitCode

# Decisions that are searched for the last change.
SEARCHED = 200
# The log holds at least one decision a minute, so the one after an instant follows within this time.
NEXT_S = 61.0


class DecisionLog(NamedTuple):
    """The decisions of a deployment.

    ``read(model, last, at)`` returns the ``last`` decisions up to the instant ``at``, newest first; ``goals``
    has the present goal of each model by name, and ``None`` if no controller answers. A controller makes its
    first decision at ``first_at`` (Unix seconds).
    """

    goals: Mapping[str, DecisionRollout | None]
    read: Callable[[str, int, float | None], Sequence[LoggedDecision]]
    first_at: float | None = None


# A decision, and the goal after it, which shows whether it was applied.
_Shown = tuple[LoggedDecision, DecisionRollout | None]


@click.command(
    help="Explain the replica count of MODEL: whether it meets its SLO, the metrics, what each policy asked"
    " for, and what limited it.\n\nWithout an option: the last change and the present decision. Reads the"
    " decision log of the state directory if no controller answers."
)
@click.argument("model", required=False)
@click.option("--last", type=click.IntRange(1, SEARCHED), metavar="N", help="The last N decisions.")
@click.option(
    "--at", metavar="TIME", type=moment,
    help="Decision in force at TIME: 12:03, 12:03:20, an ISO timestamp, or '5m ago'.",
)  # fmt: skip
@as_json
@click.pass_obj
def explain(state: StateDir, model: str | None, last: int | None, at: float | None, as_json: bool) -> None:
    if last is not None and at is not None:
        raise click.UsageError("--last counts back from now: use it without --at")
    log = _open(state)
    decisions = {name: _select(log, name, last, at) for name in ([model] if model else log.goals)}
    if as_json:
        print_json({"decisions": [logged for some in decisions.values() for logged, _ in some]})
    else:
        _print([some for some in decisions.values() if some], time.time())
    if missing := [name for name, some in decisions.items() if not some]:
        now, names = time.time(), ", ".join(missing)
        if at is not None or log.first_at is None or log.first_at <= now:
            when = "" if at is None else f" before {clock(at, now)}"
            warn(f"tidegate: no decision on {names}{when} is known")
        else:
            warn(f"tidegate: first decision on {names} in {math.ceil(log.first_at - now)} s")
        sys.exit(ExitCode.FAILED)


def _open(state: StateDir) -> DecisionLog:
    """The controller's decisions, or those in the log file if no controller answers."""
    try:
        client = controller_client(state)
        status = client.status()
    except Unreachable as error:
        if not state.decisions_path.exists():
            raise
        warn(f"{str(error).rstrip('.')}. Decisions are read from {state.decisions_path}.")
    else:
        goals = {
            each.name: DecisionRollout(each.mode, each.target, each.phase, each.barred)
            for each in status.models
        }
        return DecisionLog(goals, client.decisions, status.epoch + LISTEN_S)
    deployment = stored_deployment(state)
    journal = DecisionJournal(state.decisions_path)
    return DecisionLog(
        {spec.name: None for spec in deployment.models if spec.is_scaled},
        lambda model, last, at: journal.read(last, at, deployment.model(model).name),
    )


def _select(log: DecisionLog, model: str, last: int | None, at: float | None) -> list[_Shown]:
    """The decisions to explain, oldest first."""
    until = None if at is None else at + NEXT_S
    decisions = log.read(model, SEARCHED if last is None else last, until)
    newest = log.goals.get(model) if at is None else None
    shown = [
        (each, _goal_before(decisions[i - 1].decision) if i else newest)
        for i, each in enumerate(decisions)
        if at is None or each.decision.at <= at
    ]
    if last is None:
        change = next((each for each in shown if each[0].decision.changes), None)
        shown = shown[:1] if change is None or change is shown[0] else [shown[0], change]
    return shown[::-1]


def _goal_before(decision: Decision) -> DecisionRollout:
    return DecisionRollout(decision.was_mode, decision.was_count)


def _print(models: Sequence[Sequence[_Shown]], now: float) -> None:
    out = console()
    for i, decisions in enumerate(models):
        if i:
            out.print()
        out.print(verdict(decisions[-1][0], now))
        for logged, after in decisions:
            out.print()
            out.print(render_decision(logged, after, now))
