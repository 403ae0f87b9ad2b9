"""Whole timelines of decisions, as anybody would read them: a change of any is a change of behaviour.

After one that is meant, write them anew and read what ``git diff`` says of it::

    GOLDEN=write .venv/bin/pytest tests/golden
"""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path

import pytest

from policy.scaling.decision_types import Decision, Situation
from tests.golden.scenarios import SCENARIOS
from tests.policy.control_play import NOON, Fleet

HERE = Path(__file__).parent


def said(given: Situation, made: Decision) -> str:
    """One decision in a line: when, what was there, what shall be, and why."""
    supply, demand = given.supply, given.signals.demand
    there = f"{given.mode} {supply.serving} of {given.count}"
    if supply.draining or given.leaving:
        there += f", {supply.draining + sum(given.leaving.values())} leaving"
    load = "nothing told"
    if demand is not None:
        load = f"{demand.arrivals.last_20_s:5.2f} req/s, {demand.queued:3d} queued"
        if demand.age_s > given.guard.stale_s:
            load += f", {demand.age_s:.0f} s ago"
    goes = "  " if not made.changes else "->"
    shall = f"{goes} {made.count}" if made.mode == given.mode else f"{goes} {made.mode} {made.count}"
    return f"{given.at - NOON:6.0f} s  {given.model:5}  {load} | {there} {shall} | {made.reason}"


def gist(made: Decision) -> object:
    """What of a decision is worth a line of its own."""
    rules = [(each.rule, each.was, each.now) for each in made.applied_guardrails]
    return made.mode, made.count, made.proposal.count, rules, made.changes


def trace(fleet: Fleet) -> str:
    """The decisions of each model in turn: of those that are alike the first, and how many follow it."""
    lines = []
    for model in fleet.models:
        made = [(given[model.name], decisions[model.name]) for given, decisions in fleet.log]
        for _, alike in groupby(made, key=lambda pair: gist(pair[1])):
            first, *rest = alike
            lines.append(said(*first) + (f" (and {len(rest)} alike)" if rest else ""))
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_decided_as_it_was(name: str) -> None:
    path, scenario = HERE / f"{name}.txt", SCENARIOS[name]
    found = f"{scenario.__doc__}\n\n{trace(scenario())}"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(found)
    assert found.splitlines() == path.read_text().splitlines()


def test_every_trace_is_of_a_scenario() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(SCENARIOS)
