"""Decisions are counted by change and guardrail; forecasts are judged when their instant has come."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from policy.scaling.decision_types import Decision
from policy.signals.types import Signals
from serve.autoscaler.decision_metrics import DecisionCounts
from tests.tidegate.decisions import DEMAND, OPTIONS, decision, situation, unchanged


def take(counts: DecisionCounts, made: Decision, **over: object) -> None:
    counts.take({"sim": made}, {"sim": situation(at=made.at, **over)})


@pytest.mark.parametrize(
    ("made", "change", "rule"),
    [
        (decision(), "up", "step"),
        (unchanged(), "none", "policy"),
        (decision(count=1, applied_guardrails=()), "down", "policy"),
        (decision(mode="single-large", count=1), "mode", "step"),
    ],
)
def test_a_decision_is_counted_by_change_and_guardrail(made: Decision, change: str, rule: str) -> None:
    counts = DecisionCounts()
    take(counts, made)
    assert counts.decisions == {("sim", change, rule): 1}


def test_a_forecast_is_judged_by_the_rate_at_its_instant() -> None:
    counts = DecisionCounts()
    take(counts, decision(at=1000.0))  # 12.4/s, for 6 s later
    take(counts, unchanged(at=1005.0, proposal=decision().proposal))
    assert counts.forecasts == {}
    take(counts, unchanged(at=1006.0, proposal=decision().proposal))  # 11.84/s came
    assert (counts.forecasts, counts.errors) == ({"sim": 1}, {("sim", "above"): pytest.approx(0.56)})


def test_a_forecast_without_signals_at_its_instant_is_not_judged() -> None:
    counts = DecisionCounts()
    take(counts, decision(at=1000.0))
    take(counts, unchanged(at=1010.0), signals=Signals())
    take(counts, unchanged(at=1020.0), signals=Signals(demand=DEMAND))
    assert counts.forecasts == {"sim": 1}  # the second one, made at 1010


def test_forecasts_are_judged_in_the_order_of_their_instants() -> None:
    """A shorter start time makes a later forecast due before an earlier one."""
    counts = DecisionCounts()
    slow = tuple(replace(option, lead_s=600.0) for option in OPTIONS)
    take(counts, decision(at=1000.0), mode_options=slow)  # for 1600
    take(counts, decision(at=1005.0))  # for 1011
    take(counts, unchanged(at=1011.0))
    assert counts.forecasts == {"sim": 1}


def test_a_forecast_for_a_time_without_decisions_is_not_judged() -> None:
    counts = DecisionCounts()
    take(counts, decision(at=1000.0))
    take(counts, unchanged(at=1100.0))
    assert counts.forecasts == {}


def test_a_removed_model_has_no_forecasts() -> None:
    counts = DecisionCounts()
    take(counts, decision(at=1000.0))
    counts.forget("sim")
    take(counts, unchanged(at=1010.0))
    assert counts.forecasts == {}
