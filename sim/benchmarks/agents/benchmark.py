"""The benchmark of sessions of agents: routers on the same sessions, at several loads and sizes of the cache.

The load is a closed loop of :mod:`sim.workload.generators.agents`. A load of 1 is the capacity: the rate of
sessions at which the replicas would be busy all the time with full batches and would compute no token twice,
by the performance model. A cache of 1 holds all sessions that are open at that load (Little's law).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.engine.builtin_profiles import profile
from policy.engine.performance_model import BLOCK, EngineModel
from policy.routing.router import Router
from policy.scaling.policies.registry import choose, make
from policy.stats.quantiles import nearest_rank
from policy.wire.capture import BLOCK_TOKENS
from sim.arrivals import Arrival
from sim.benchmarks.agents.contenders import (
    CacheAwareRouter,
    LeastLoadedRouter,
    RoundRobinRouter,
    SessionHashRouter,
    WeightedScoresRouter,
)
from sim.simulator.gateway import RouterFactory
from sim.simulator.run import simulate
from sim.simulator.run_record import RequestOutcome
from sim.workload.generators.agents import Agents
from sim.workload.generators.arrivals import RateShape
from sim.workload.generators.generate import GeneratedWorkload, generate
from sim.workload.generators.request_distributions import LengthDistribution

MODEL = "m"
PROFILE = "h100-8b"
# The most requests of a replica's batch.
SEATS = 16
# The longest of the generator's contexts, and an answer.
MAX_MODEL_LEN = 262_144
# Tokens of a tool result, with a mean of 2,400, and of an answer, with a mean of 444.
ADDED = LengthDistribution(p50=900, p99=24_000, max=32_000)
ANSWERED = LengthDistribution(p50=225, p99=3_400)
# The sessions whose needs are measured.
SAMPLE = 500
# This part of the run, in which the first sessions come, is not measured.
WARM_UP = 0.25
LOADS = (0.5, 0.8, 1.0)
# The size of all caches together, in tokens of open sessions. Chance makes more of them open than on average.
CACHES = (1.5, 0.5)

ROUTERS: dict[str, RouterFactory] = {
    "tidegate": Router,
    "round_robin": RoundRobinRouter,
    "least_loaded": LeastLoadedRouter,
    "session_hash": SessionHashRouter,
    "cache_aware": CacheAwareRouter,
    "weighted_scores": WeightedScoresRouter,
}


class AgentBenchmarkSetup(NamedTuple):
    """The fleet, and how long sessions arrive."""

    replicas: int = 4
    duration_s: float = 7200.0
    agents: Agents = Agents()


class LoadAndCacheSize(NamedTuple):
    """A load, as a fraction of the capacity, and a size of the cache in tokens of the open sessions."""

    load: float
    cache: float


class AgentTrial(NamedTuple):
    """A router in a cell, with a seed."""

    setup: AgentBenchmarkSetup
    cell: LoadAndCacheSize
    seed: int
    router: str


class AgentRunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The 95th percentile and mean of TTFT in seconds, and the prompt tokens computed more than once.

    TTFT is of the requests after the warm-up and before the last session came, tokens are of all, as a
    fraction of the least that any router computes.
    """

    ttft_p95_s: float
    ttft_mean_s: float
    computed_twice: float
    requests: int


class SessionResourceCost(NamedTuple):
    """What the sessions of a workload need: machine seconds, and token-seconds of KV cache per session."""

    machine_s: float
    token_s: float


def sessions(setup: AgentBenchmarkSetup, rate: float, seed: int) -> list[Arrival]:
    """The requests of all sessions that arrive at ``rate`` per second."""
    spec = GeneratedWorkload(
        arrivals=RateShape(rate=rate), input_tokens=ADDED, output_tokens=ANSWERED, agents=setup.agents
    )
    return list(generate(spec, f"agents {seed}", setup.duration_s, lambda path: ()))


@lru_cache(maxsize=4)
def needs(setup: AgentBenchmarkSetup, model: EngineModel) -> SessionResourceCost:
    """Measured on a sample of some sessions."""
    sample = sessions(setup, SAMPLE / setup.duration_s, 0)
    begun = sum(not arrival.follows for arrival in sample)
    machine_s = token_s = 0.0
    for arrival, uncached in zip(sample, least_computed(sample), strict=True):
        # A step of a full batch whose requests all have this context.
        step_s = model.step_time(SEATS, SEATS * arrival.input_tokens, SEATS)
        machine_s += arrival.output_tokens * step_s / SEATS + uncached * model.c
        token_s += arrival.input_tokens * (arrival.output_tokens * step_s + arrival.think_s)
    return SessionResourceCost(machine_s / begun, token_s / begun)


def least_computed(arrivals: Iterable[Arrival]) -> list[int]:
    """The tokens of each prompt that no earlier one had."""
    seen: set[int] = set()
    computed = []
    for arrival in arrivals:
        hits = 0
        for block in arrival.blocks:
            if block not in seen:
                break
            hits += 1
        seen.update(arrival.blocks[hits:])
        cached = min(hits * BLOCK_TOKENS, (arrival.input_tokens - 1) // BLOCK * BLOCK)
        computed.append(arrival.input_tokens - cached)
    return computed


def deployment(replicas: int, kv_tokens: float) -> Deployment:
    """A fleet of equal replicas with ``kv_tokens`` of KV cache each."""
    return parse({
        "models": [{
            "name": MODEL, "engine": "sim", "sim": {"profile": PROFILE},
            "engine_args": {
                "max_model_len": MAX_MODEL_LEN, "max_num_seqs": SEATS,
                "num_gpu_blocks_override": max(int(kv_tokens), MAX_MODEL_LEN) // BLOCK,
            },
            "shapes": {"s": {"gpus": 1, "max_in_flight": 4096}},
            "modes": {"s": {"shape": "s", "replicas": replicas}},
            "control": {"policy": {"static": {"replicas": replicas}}},
        }],
        "budget": {"gpus": replicas},
        "gateway": {"queue_timeout_s": 3600},
    })  # fmt: skip


def run_trial(trial: AgentTrial) -> AgentRunResult:
    """The same trial has the same outcome."""
    setup, cell, seed = trial.setup, trial.cell, trial.seed
    need = needs(setup, profile(PROFILE).model)
    rate = cell.load * setup.replicas / need.machine_s
    trace = sessions(setup, rate, seed)
    least = sum(least_computed(trace))
    document = deployment(setup.replicas, cell.cache * rate * need.token_s / setup.replicas)
    policy = make(choose("policy", {"static": {"replicas": setup.replicas}}))
    record = simulate(document, {MODEL: policy}, trace, seed=seed, router=ROUTERS[trial.router])
    requests = record.requests[MODEL]
    assert bool((requests.outcome == RequestOutcome.SERVED).all())
    measured = (requests.at >= WARM_UP * setup.duration_s) & (requests.at < setup.duration_s)
    ttft = requests.ttft_s[measured]
    # The last token of an answer is never computed, the first one in the step that completes the prompt.
    decoded = int(requests.output_tokens.sum()) - len(requests)
    computed = sum(span.tokens for span in record.spans) - decoded
    return AgentRunResult(
        ttft_p95_s=nearest_rank(ttft.tolist(), 0.95),
        ttft_mean_s=float(np.mean(ttft)),
        computed_twice=computed / least - 1.0,
        requests=len(requests),
    )


def mean_outcome(outcomes: Sequence[AgentRunResult]) -> AgentRunResult:
    """The mean over seeds; ``requests`` is the sum."""
    return AgentRunResult(
        ttft_p95_s=fmean(each.ttft_p95_s for each in outcomes),
        ttft_mean_s=fmean(each.ttft_mean_s for each in outcomes),
        computed_twice=fmean(each.computed_twice for each in outcomes),
        requests=sum(each.requests for each in outcomes),
    )


def run_trials(
    trials: Sequence[AgentTrial],
    processes: int | None = None,
    ended: Callable[[AgentTrial], None] = lambda trial: None,
) -> list[AgentRunResult]:
    """Run all of them, in the order of ``trials``; ``ended`` gets each one as its outcome is taken."""
    found = []
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for trial, outcome in zip(trials, pool.map(run_trial, trials), strict=True):
            ended(trial)
            found.append(outcome)
    return found
