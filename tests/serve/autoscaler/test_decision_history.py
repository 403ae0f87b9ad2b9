"""The history of decisions: its bounds, how rows are merged, their order, and a restart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from policy.config.deployment import ResourceBudget
from policy.scaling.policies.registry import NAMES
from policy.scaling.view import Supply
from policy.signals.types import Signals
from serve.autoscaler import decision_history
from serve.autoscaler.decision_history import COLUMNS, DAY_S, DecisionHistory, ModelHistory
from serve.autoscaler.decision_journal import DecisionJournal, DecisionRound, JournaledPolicies
from tests.tidegate.decisions import DEMAND, SIGNALS, decision, situation

BEGAN = 1_000_020.0


@pytest.fixture
def history() -> DecisionHistory:
    return DecisionHistory()


def add(history: DecisionHistory, at: float, count: int = 4, *, queued: int = 0, **over: Any) -> None:
    """A decision that keeps ``count``, unless ``over`` says otherwise."""
    signals = replace(SIGNALS, demand=replace(DEMAND, queued=queued))
    made = decision(**{"at": at, "count": count, "was_count": count} | over)
    history.add(situation(at=at, signals=signals), made)


def everything(history: DecisionHistory, step_s: float = 0.0) -> ModelHistory:
    return history.read("sim", 0.0, step_s=step_s)


def test_a_row_has_the_figures_of_its_decision(history: DecisionHistory) -> None:
    supply = Supply(wanted=3, serving=2, starting_s=(4.0,), draining=1)
    history.add(
        situation(supply=supply, leaving={"single-large": 1}), decision(at=BEGAN, others={NAMES[0]: 3})
    )
    seen = everything(history)
    assert (seen.at, seen.mode) == ([BEGAN], [decision().mode])
    assert set(seen.columns) == COLUMNS.keys() - {"mode"}
    row = {name: values[0] for name, values in seen.columns.items()}
    assert (row["ready"], row["starting"], row["draining"], row["leaving"]) == (2, 1, 1, 1)
    assert row["gpus"] == 4 * 1 + 1 * 4
    assert (row["arrivals_per_s"], row["ttft_p95_s"], row["met"]) == (11.84, 1.32, 0.9)
    assert row["kv_used"] == pytest.approx((0.62 + 0.71) / 2)
    assert (row["watts"], row[NAMES[0]], row[NAMES[1]]) == (None, 3, None)


def test_without_signals_there_are_gaps_and_no_zeros(history: DecisionHistory) -> None:
    history.add(situation(signals=Signals()), decision(at=BEGAN, shadow=None))
    columns = everything(history).columns
    for name in ("arrivals_per_s", "queued", "ttft_p95_s", "met", "kv_used", "watts", "shadow"):
        assert columns[name] == [None]


@pytest.mark.slow
def test_an_hour_is_kept_at_full_detail_and_a_day_by_the_minute(history: DecisionHistory) -> None:
    for tick in range(0, 30 * 3600, 5):
        add(history, BEGAN + tick)
    at = everything(history).at
    end, gaps = at[-1], [later - sooner for sooner, later in itertools.pairwise(at)]
    detail = [instant for instant in at if instant > end - 3600]
    assert len(detail) == 720
    assert end - at[0] < DAY_S + 3600
    assert min(gaps) == 5.0
    assert max(gaps) <= 2 * 60.0
    assert at == sorted(at)


@pytest.mark.slow
def test_memory_is_bounded_however_often_decisions_are_made(history: DecisionHistory) -> None:
    for tick in range(40_000):
        add(history, BEGAN + tick / 10)
    assert len(everything(history).at) <= 3600 + decision_history.SLACK + 10
    for tick in range(2000):
        add(history, BEGAN + 10_000 + tick, 4, was_count=3)
    changes = everything(history).changes
    assert len(changes) == decision_history.MAX_CHANGES
    assert changes[-1].at == BEGAN + 10_000 + 1999


def test_decisions_within_a_second_replace_each_other(history: DecisionHistory) -> None:
    add(history, BEGAN, 1)
    add(history, BEGAN + 0.5, 2)
    add(history, BEGAN + 1.5, 3)
    assert everything(history).columns["target"] == [2, 3]


def test_rows_are_merged_by_the_meaning_of_their_column(history: DecisionHistory) -> None:
    for second, (count, queued) in enumerate([(1, 4), (2, 9), (3, 2)]):
        add(history, BEGAN + second, count, queued=queued)
    add(history, BEGAN + 10, 5, queued=1)
    seen = everything(history, step_s=10.0)
    assert seen.at == [BEGAN, BEGAN + 10]
    assert seen.columns["target"] == [3, 5]
    assert seen.columns["queued"] == [9, 1]
    assert seen.columns["arrivals_per_s"] == [11.84, 11.84]


def test_a_mean_leaves_out_what_was_not_measured(history: DecisionHistory) -> None:
    history.add(situation(signals=Signals()), decision(at=BEGAN))
    add(history, BEGAN + 1)
    assert everything(history, step_s=60.0).columns["ttft_p95_s"] == [1.32]


def test_a_clock_that_was_set_back_changes_no_order(history: DecisionHistory) -> None:
    for at in (BEGAN, BEGAN + 5, BEGAN - 100, BEGAN + 10):
        add(history, at)
    assert everything(history).at == [BEGAN, BEGAN + 5, BEGAN + 10]


def test_a_range_is_read(history: DecisionHistory) -> None:
    for tick in range(10):
        add(history, BEGAN + tick, 4 + tick % 2, was_count=4)
    seen = history.read("sim", BEGAN + 3, BEGAN + 6)
    assert seen.at == [BEGAN + 3, BEGAN + 4, BEGAN + 5, BEGAN + 6]
    assert [change.at for change in seen.changes] == [BEGAN + 3, BEGAN + 5]
    assert history.read("sim", BEGAN + 99).at == []
    assert history.read("unknown", 0.0, math.inf).at == []


def test_a_removed_model_is_forgotten(history: DecisionHistory) -> None:
    add(history, BEGAN)
    assert history.names() == ["sim"]
    history.forget("sim")
    assert history.names() == []


def write(path: Path, counts: Mapping[float, int]) -> DecisionJournal:
    """A journal with a decision at each instant, for that count."""
    journal = DecisionJournal(path / "decisions.jsonl")
    for at, count in counts.items():
        made = decision(at=at, model="sim", count=count, was_count=count - 1, applied_guardrails=())
        journal.put(
            DecisionRound(
                at=at,
                policies={"sim": JournaledPolicies(live="static")},
                situations={"sim": situation(at=at, model="sim")},
                budget=ResourceBudget(),
                decisions={"sim": made},
            )
        )
    journal.flush()
    return journal


def test_a_restart_continues_with_the_last_day_on_disk(history: DecisionHistory, tmp_path: Path) -> None:
    history.restore(write(tmp_path, {BEGAN - 2 * DAY_S: 1, BEGAN - 600.0: 2, BEGAN - 60.0: 3}), BEGAN)
    add(history, BEGAN, 4)
    seen = everything(history)
    assert seen.at == [BEGAN - 600, BEGAN - 60, BEGAN]
    assert seen.columns["target"] == [2, 3, 4]
    assert [change.count for change in seen.changes] == [2, 3]


@pytest.mark.parametrize("restart_at", [BEGAN, BEGAN + 7300.0])
def test_rounds_of_a_clock_that_was_set_back_are_left_out(
    history: DecisionHistory, tmp_path: Path, restart_at: float
) -> None:
    rounds = {BEGAN - 600.0: 1, BEGAN + 7140.0: 2, BEGAN + 7200.0: 3, BEGAN - 60.0: 4}
    history.restore(write(tmp_path, rounds), restart_at)
    add(history, restart_at + 60.0, 5)
    assert everything(history).columns["target"] == [1, 4, 5]
