"""All trials of the benchmark, on several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context

from policy.config.control import Choice
from sim.benchmarks.policies.benchmark_setup import Setup
from sim.benchmarks.policies.run import PLAN, Trial, TrialResult, run_trial
from sim.benchmarks.policies.sizing import SHIPPED, ReplicaSize, ladder

# Capacity factors of the plan, of which the cheapest that meets the SLO counts: bins hide bursts, and
# replicas in a pool help each other out.
PLANNED = (0.84, 0.88, 0.92, 0.96, 1.0, 1.04, 1.08, 1.12)


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


def parameter_steps(name: str, size: ReplicaSize, each: int = 1) -> list[Choice]:
    """Every ``each``-th setting of a policy, the default of ``predictive`` among them."""
    settings = ladder(name, size.full)
    return list(settings[SHIPPED % each :: each])


def describe(choice: Choice) -> str:
    """A setting as a table names it."""
    parameters = {} if isinstance(choice, str) else next(iter(choice.values()))
    return ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in parameters.items()
    )


def run_all(
    field: Iterable[Trial],
    processes: int | None = None,
    ended: Callable[[TrialResult], None] = lambda result: None,
) -> list[TrialResult]:
    """Run all of them, in the order of ``field``; ``ended`` gets each result as it ends."""
    field = list(field)
    found: dict[int, TrialResult] = {}
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        pending = {pool.submit(run_trial, trial): number for number, trial in enumerate(field)}
        try:
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    found[pending[future]] = result = future.result()
                    del pending[future]
                    ended(result)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [found[number] for number in range(len(field))]
