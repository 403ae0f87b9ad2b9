"""The capacity of a replica is found in few simulated seconds; oversized requests cost no run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.deployment_file.parse import parse
from sim.arrivals import Arrival
from sim.oracle import replica_capacity
from sim.oracle.replica_capacity import AGAIN, TRIALS, Trials, attained_rate, rate_attaining
from sim.simulator import run as simulator_run
from sim.simulator.run_record import RunRecord
from sim.workload.per_model_load import ModelNames, trace_load

GIANT = Arrival(0.0, 10_000_000, 20)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[RunRecord]:
    made: list[RunRecord] = []
    simulate = simulator_run.simulate

    def kept(*given: Any, **named: Any) -> RunRecord:
        made.append(simulate(*given, **named))
        return made[-1]

    monkeypatch.setattr(replica_capacity, "simulate", kept)
    return made


def rate(requests: Sequence[Arrival], speed: float = 0.05, trials: Trials = TRIALS) -> float:
    model = {
        "name": "m",
        "engine": "sim",
        "sim": {"profile": "h100-8b", "speed": speed},
        "shapes": {"small": {"gpus": 1, "max_in_flight": 64}},
        "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 8}}},
        "control": {"tick_s": 1, "slo": {"itl_p95_s": 0.25}},
    }
    of = parse({"models": [model]})
    load = trace_load(requests, ModelNames(["m"])).loads["m"]
    return attained_rate(
        of, of.models[0], "multi-replica", arrivals=lambda: requests, load=load, seed=0, trials=trials
    )


@pytest.mark.slow
def test_the_capacity_of_a_short_trace_needs_short_trial_runs(runs: list[RunRecord]) -> None:
    assert rate([Arrival(0.0, 200, 20), Arrival(5.0, 200, 20)]) > 0
    assert all(len(run.requests["m"]) <= 2 * AGAIN or run.ends_at < 120 for run in runs)
    # The policy does not decide each second of a trial.
    assert all(len(run.moments) <= run.ends_at / 300 + 2 for run in runs)


@pytest.mark.long
def test_trials_of_slow_engines_are_bounded(runs: list[RunRecord]) -> None:
    rate([Arrival(float(i), 200, 20) for i in range(50)], trials=Trials(most_s=100.0))
    assert TRIALS.most_s > 100.0
    assert all(run.requests["m"].at[-1] <= 100.0 for run in runs)


def test_requests_beyond_the_context_length_are_refused_without_a_run(runs: list[RunRecord]) -> None:
    with pytest.raises(ValueError, match=r"only 0.00% of the requests would be within the SLO"):
        rate([GIANT])
    assert not runs


@pytest.mark.long
def test_cached_prompts_multiply_the_capacity() -> None:
    trials = Trials(requests=300, lasts_s=5.0)
    alone = [Arrival(float(i), 4100, 4) for i in range(100)]
    cached = [arrival._replace(blocks=tuple(range(1, 9))) for arrival in alone]
    assert rate(cached, trials=trials) > 4 * rate(alone, trials=trials)


@pytest.mark.long
def test_one_request_beyond_the_context_length_changes_little() -> None:
    usual, trials = [Arrival(float(i), 200, 20) for i in range(500)], Trials(requests=500)
    assert rate([GIANT, *usual], trials=trials) == pytest.approx(rate(usual, trials=trials), rel=0.1)


@pytest.mark.slow
@given(st.floats(1.01, 9.9), st.sampled_from([0.001, 0.01, 0.1]))
def test_the_found_rate_is_below_the_highest_that_attains_the_slo(edge: float, precision: float) -> None:
    tried: list[float] = []

    def run(rate: float) -> float:
        tried.append(rate)
        return 0.995 if rate <= edge else 0.6

    found = rate_attaining(run, 1.0, 10.0, 0.99, precision)
    assert found in tried
    assert edge / (1 + precision) <= found <= edge


@pytest.mark.parametrize(
    ("attained", "message"),
    [(0.5, "already at 1 requests per second 0.5 attain, expected 0.99"), (1.0, "still at 10 requests")],
)
def test_a_highest_rate_outside_the_search_range_is_refused(attained: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rate_attaining(lambda _: attained, 1.0, 10.0, 0.99)


def test_the_lowest_rate_is_tried_last() -> None:
    tried: list[float] = []

    def run(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= 3.0 else 0.0

    rate_attaining(run, 0.1, 10.0, 0.99)
    assert min(tried) > 2.0
    tried.clear()
    with pytest.raises(ValueError, match="already at 0"):
        rate_attaining(lambda rate: run(rate) - 1.0, 0.1, 10.0, 0.99)
    assert tried[-1] == min(tried) == 0.1 and len(tried) < 10
