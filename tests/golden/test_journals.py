"""Journals that an earlier version wrote are replayed to the same decisions.

``live_switch.jsonl`` was written by a controller of one machine, with simulated engines, while its load rose
and fell; ``scenarios.jsonl`` has rounds of :mod:`tests.golden.scenarios` in which limits applied.
Both are of the version before its modules were regrouped. Prose is not compared: what is decided is, with
all its numbers.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from policy.scaling.decision_types import Decision
from serve.autoscaler.decision_journal import DecisionJournal, DecisionRound
from serve.autoscaler.policies import policies_for
from tests.policy.control_play import replayed

JOURNALS = Path(__file__).parent / "journals"


def without_prose(made: Decision) -> Decision:
    """The decision with all that is not a number, a name of a mode or of a rule left out."""
    proposals = [made.proposal, made.shadow]
    # What a policy wanted beyond the bounds was not recorded then: it is shown, and decides nothing.
    proposal, shadow = (
        each and msgspec.structs.replace(each, reason="", unbounded=None) for each in proposals
    )
    return msgspec.structs.replace(
        made,
        reason="",
        proposal=proposal,
        shadow=shadow,
        applied_guardrails=tuple(msgspec.structs.replace(each, why="") for each in made.applied_guardrails),
        # What a switch takes was not recorded then, either.
        mode_forecasts=tuple(
            msgspec.structs.replace(each, why="", switch=None) for each in made.mode_forecasts
        ),
    )


@pytest.mark.parametrize("name", ["live_switch", "scenarios"])
def test_a_journal_of_an_earlier_version_replays_to_the_same_decisions(name: str) -> None:
    lines = list(DecisionJournal(JOURNALS / f"{name}.jsonl").lines())
    rounds = [line for line in lines if isinstance(line, DecisionRound)]
    assert len(rounds) > 10
    for line in rounds:
        minds = {model: policies_for(model, chosen, print) for model, chosen in line.policies.items()}
        again = replayed(line.situations, line.budget, minds)
        assert {model: without_prose(made) for model, made in again.items()} == {
            model: without_prose(made) for model, made in line.decisions.items()
        }


def test_the_live_journal_has_a_switch_each_way_and_what_came_of_it() -> None:
    lines = list(DecisionJournal(JOURNALS / "live_switch.jsonl").lines())
    made = [each for line in lines if isinstance(line, DecisionRound) for each in line.decisions.values()]
    switches = {(each.was_mode, each.mode) for each in made if each.mode != each.was_mode}
    assert switches == {("single-large", "multi-replica"), ("multi-replica", "single-large")}
    assert sum(not isinstance(line, DecisionRound) for line in lines) == 1
