"""The trials of the benchmark: each policy at each setting, and the offline plans, on several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context

from policy.config.control import Choice
from policy.scaling.policies.registry import choose, make
from sim.benchmarks.policies.benchmark_setup import MODEL, MOST, PolicyBenchmarkSetup
from sim.benchmarks.policies.sizing import SHIPPED, ReplicaSize, ladder
from sim.oracle.clairvoyant import ClairvoyantPolicy, ReplicaCountPlan
from sim.oracle.provisioning_problem import bin_arrivals
from sim.oracle.replica_schedule_search import ScheduleEvaluation, search
from sim.results.evaluation_metrics import Score, score
from sim.simulator.run import simulate
from sim.simulator.run_record import HOUR_S

PLAN = "clairvoyant"
# Runs of the search for the cheapest plan, and the least with fewer settings.
SEARCHED, LEAST_SEARCHED = 15, 10
# The plan runs without the safety limits.
UNHELD = {"hold_s": 0.1, "max_step_up": 100, "max_step_down": 1.0}


@dataclass(frozen=True, slots=True)
class PolicyTrial:
    """``choice`` on ``factor`` times the load drawn with ``seed``, or a search of ``searched`` plans.

    The search begins at the capacity ``start_mu`` of a replica. ``setting`` is unique within one policy.
    """

    setup: PolicyBenchmarkSetup
    factor: float
    lead_s: float
    seed: int
    name: str
    setting: str
    choice: Choice = ""
    start_mu: float = 0.0
    searched: int = 0


@dataclass(frozen=True, slots=True)
class PolicyTrialResult:
    """A run of a trial; for a plan also the lower bound, and the ``mu`` of a fluid plan."""

    trial: PolicyTrial
    score: Score
    lower_hours: float = 0.0
    mu: float | None = None


def trials(
    setup: PolicyBenchmarkSetup,
    size: ReplicaSize,
    names: Sequence[str],
    *,
    leads_s: Sequence[float],
    seeds: Sequence[int],
    each: int = 1,
) -> list[PolicyTrial]:
    """The plans, and each policy of ``names`` at every ``each``-th setting, by start-up time and seed."""
    found = []
    for lead_s in leads_s:
        for seed in seeds:
            runs = max(LEAST_SEARCHED, SEARCHED // each)
            found.append(
                PolicyTrial(setup, size.factor, lead_s, seed, PLAN, "", start_mu=size.mu, searched=runs)
            )
            for name in names:
                for choice in parameter_steps(name, size, each):
                    found.append(
                        PolicyTrial(setup, size.factor, lead_s, seed, name, describe(choice), choice)
                    )
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


def run_trial(trial: PolicyTrial) -> list[PolicyTrialResult]:
    """Run ``trial``; the same trial gives the same results: one, or those of all plans of a search."""
    if trial.searched:
        return _search(trial)
    setup = trial.setup
    arrivals = setup.arrivals(trial.factor, trial.seed)
    policy = make(choose("policy", trial.choice))
    record = simulate(setup.deployment(trial.lead_s), {MODEL: policy}, arrivals, seed=trial.seed)
    return [PolicyTrialResult(trial, score(record, MODEL, setup.stretch, setup.attainment))]


def _search(trial: PolicyTrial) -> list[PolicyTrialResult]:
    setup, stretch = trial.setup, trial.setup.stretch
    arrivals = setup.arrivals(trial.factor, trial.seed)
    document = setup.deployment(trial.lead_s, UNHELD)
    problem = replace(setup.problem(arrivals, trial.start_mu, trial.lead_s, since=0.0), most=MOST)
    lower_hours = setup.bound(arrivals, trial.lead_s, since=stretch.since) / HOUR_S
    scores: list[Score] = []

    def run(plan: ReplicaCountPlan) -> ScheduleEvaluation:
        record = simulate(document, {MODEL: ClairvoyantPolicy(plan)}, arrivals, seed=trial.seed)
        scores.append(score(record, MODEL, stretch, setup.attainment))
        requests = record.requests[MODEL]
        missed = bin_arrivals(requests.at[~requests.met], problem.bin_s, 0.0, stretch.until)
        return ScheduleEvaluation(missed, scores[-1].attainment, scores[-1].gpu_hours * HOUR_S)

    found = search(problem, run, trial.searched, int(stretch.since // problem.bin_s))
    return [
        PolicyTrialResult(replace(trial, setting=f"plan {number}"), each, lower_hours, schedule.mu)
        for number, (schedule, each) in enumerate(zip(found, scores, strict=True), 1)
    ]


def run_all(
    field: Sequence[PolicyTrial],
    processes: int | None = None,
    ended: Callable[[list[PolicyTrialResult]], None] = lambda results: None,
) -> list[PolicyTrialResult]:
    """Run all of them, in the order of ``field``; ``ended`` gets the results of each trial as it ends.

    Searches are begun first, as they take longest.
    """
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        order = sorted(range(len(field)), key=lambda index: -field[index].searched)
        futures = {index: pool.submit(run_trial, field[index]) for index in order}
        try:
            for future in as_completed(futures.values()):
                ended(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [result for index in range(len(field)) for result in futures[index].result()]
