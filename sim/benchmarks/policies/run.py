"""The trials of the benchmark: each policy at each setting, and the offline plan, on several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from policy.config.control import Choice
from policy.scaling.policies.registry import choose, make
from sim.benchmarks.policies.benchmark_setup import MODEL, Setup
from sim.benchmarks.policies.sizing import SHIPPED, ReplicaSize, ladder
from sim.oracle.clairvoyant import Clairvoyant, clairvoyant
from sim.results.score import Score, score
from sim.simulator.run import simulate
from sim.simulator.run_record import HOUR_S

PLAN = "clairvoyant"
# Capacity factors of the plan, of which the cheapest that meets the SLO counts: bins hide bursts, replicas in
# a large pool take more together, and prefixes are cached in more of them.
PLANNED = (0.84, 0.88, 0.92, 0.96, 1.0, 1.04, 1.08, 1.12, 1.2, 1.3, 1.4, 1.5, 1.65, 1.8, 2.0)
# The plan runs without the safety limits.
UNHELD = {"hold_s": 0.1, "max_step_up": 100, "max_step_down": 1.0}


@dataclass(frozen=True, slots=True)
class Trial:
    """``choice`` on ``factor`` times the load drawn with ``seed``; with a ``mu`` the plan made with it.

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


def trials(
    setup: Setup,
    size: ReplicaSize,
    names: Sequence[str],
    *,
    leads_s: Sequence[float],
    seeds: Sequence[int],
    each: int = 1,
) -> list[Trial]:
    """The plan and each policy of ``names`` at every ``each``-th setting, for each start-up time and seed."""
    found = []
    for lead_s in leads_s:
        for seed in seeds:
            for part in PLANNED[::each]:
                mu = part * size.mu
                found.append(Trial(setup, size.factor, lead_s, seed, PLAN, f"{mu:.4g} requests/s", mu=mu))
            for name in names:
                for choice in parameter_steps(name, size, each):
                    found.append(Trial(setup, size.factor, lead_s, seed, name, describe(choice), choice))
    return found


def parameter_steps(name: str, size: ReplicaSize, each: int = 1) -> tuple[Choice, ...]:
    """Every ``each``-th setting of a policy, the default of ``predictive`` among them."""
    return ladder(name, size.full)[SHIPPED % each :: each]


def describe(choice: Choice) -> str:
    """A setting as a table names it."""
    parameters = {} if isinstance(choice, str) else next(iter(choice.values()))
    return ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in parameters.items()
    )


def run_trial(trial: Trial) -> TrialResult:
    """Run ``trial``; the same trial gives the same result."""
    setup = trial.setup
    arrivals = setup.arrivals(trial.factor, trial.seed)
    if not trial.mu:
        policy = make(choose("policy", trial.choice))
        record = simulate(setup.deployment(trial.lead_s), {MODEL: policy}, arrivals, seed=trial.seed)
        return TrialResult(trial, score(record, MODEL, setup.stretch, setup.attainment))
    whole = setup.problem(arrivals, trial.mu, trial.lead_s, since=0.0)
    judged = setup.problem(arrivals, trial.mu, trial.lead_s, since=setup.stretch.since)
    planned = Clairvoyant(clairvoyant(whole))
    record = simulate(setup.deployment(trial.lead_s, UNHELD), {MODEL: planned}, arrivals, seed=trial.seed)
    return TrialResult(
        trial,
        score(record, MODEL, setup.stretch, setup.attainment),
        clairvoyant(judged).replica_s / HOUR_S,
        setup.bound(arrivals, trial.lead_s, since=setup.stretch.since) / HOUR_S,
    )


def run_all(
    field: Sequence[Trial],
    processes: int | None = None,
    ended: Callable[[TrialResult], None] = lambda result: None,
) -> list[TrialResult]:
    """Run all of them, in the order of ``field``; ``ended`` gets each result as it ends."""
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run_trial, trial) for trial in field]
        try:
            for future in as_completed(futures):
                ended(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]
