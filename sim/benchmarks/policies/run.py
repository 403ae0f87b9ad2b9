"""One run of the benchmark: one policy at one setting, or the offline plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from policy.config.control import Choice
from policy.scaling.policies.registry import choose, make
from sim.benchmarks.policies.benchmark_setup import MODEL, Setup
from sim.oracle.clairvoyant import Clairvoyant, clairvoyant
from sim.oracle.linear_program import lower_bound
from sim.oracle.problem import Problem, bin_arrivals
from sim.request_arrival import Arrival
from sim.results.score import Score, score
from sim.simulator.run import simulate
from sim.simulator.run_record import HOUR_S

PLAN = "clairvoyant"
# Requests of the Azure trace are answered in about as long.
BIN_S = 10.0
# The plan runs without the safety limits.
UNHELD = {"hold_s": 0.1, "max_step_up": 100, "max_step_down": 1.0}


@dataclass(frozen=True, slots=True)
class Trial:
    """``choice`` on ``factor`` times the load drawn with ``seed``; with a ``mu`` the offline plan made with
    it.

    ``setting`` is unique within one policy.
    """

    setup: Setup
    factor: float
    lead_s: float
    seed: int
    name: str
    setting: str
    choice: Choice = ""
    mu: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial; for the plan also its GPU-hours on paper and the lower bound."""

    trial: Trial
    score: Score
    plan_hours: float = 0.0
    lower_hours: float = 0.0


def run_trial(trial: Trial) -> TrialResult:
    """Run ``trial``; the same trial gives the same result."""
    setup = trial.setup
    arrivals = setup.arrivals(trial.factor, trial.seed)
    if not trial.mu:
        policy = make(choose("policy", trial.choice))
        record = simulate(setup.deployment(trial.lead_s), {MODEL: policy}, arrivals, seed=trial.seed)
        return TrialResult(trial, score(record, MODEL, setup.stretch, setup.attainment))
    whole = problem(setup, arrivals, trial.mu, trial.lead_s, since=0.0)
    judged = problem(setup, arrivals, trial.mu, trial.lead_s, since=setup.stretch.since)
    planned = Clairvoyant(clairvoyant(whole))
    record = simulate(setup.deployment(trial.lead_s, UNHELD), {MODEL: planned}, arrivals, seed=trial.seed)
    return TrialResult(
        trial,
        score(record, MODEL, setup.stretch, setup.attainment),
        clairvoyant(judged).replica_s / HOUR_S,
        lower_bound(judged).replica_s / HOUR_S,
    )


def problem(setup: Setup, arrivals: Iterable[Arrival], mu: float, lead_s: float, *, since: float) -> Problem:
    """The problem of the offline optimum from ``since`` on, at ``mu`` requests per second per replica."""
    until = setup.stretch.until
    at = np.array([arrival.at for arrival in arrivals])
    return Problem(
        demand=bin_arrivals(at, BIN_S, since, until),
        bin_s=BIN_S,
        mu=mu,
        lead_s=lead_s,
        attainment=setup.attainment,
        wait_s=setup.ttft_p95_s,
        least=1,
    )
