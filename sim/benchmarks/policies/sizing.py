"""Sizing of the benchmark: the load, the capacity per replica, and the parameter sweep of each policy.

Policies with engine-dependent units (concurrency, KV cache use) are swept around the values that a replica
shows at its capacity (:mod:`sim.oracle.replica_capacity`). The sweep of ``predictive`` contains its defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from policy.config.control import Choice
from policy.engine.builtin_profiles import profile
from policy.scaling.policies.predictive import Predictive
from policy.scaling.policies.static import Static
from policy.scaling.policies.token_saturation import TokenSaturation
from sim.benchmarks.policies.benchmark_setup import MODE, MODEL, MOST, PolicyBenchmarkSetup
from sim.oracle.clairvoyant import clairvoyant
from sim.oracle.replica_capacity import attained_rate
from sim.simulator.run import simulate
from sim.simulator.run_record import RequestOutcome
from sim.workload.per_model_load import ModelNames, trace_load

# Targets as fractions of what a replica shows at its capacity.
PARTS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15)
# The step of ``predictive`` with the default parameters.
SHIPPED = 2
# Thrifty settings also react later to a change of the rate, and extrapolate it for less time.
_CAREFUL = {"quantile": 0.95, "margin": 1.12, "down": 0.95, "full": 0.85}
_THRIFTY = {"quantile": 0.5, "margin": 1.0, "level_s": 120.0, "trend_s": 120.0, "lasts_s": 60.0}
CAREFUL_TO_THRIFTY: tuple[dict[str, float], ...] = (
    {**_CAREFUL, "quantile": 0.99, "margin": 1.25, "down": 0.85},
    _CAREFUL,
    {"full": Predictive().full},
    {"full": 0.92},
    {**_THRIFTY, "full": 0.92},
    {**_THRIFTY, "full": 1.0},
    {**_THRIFTY, "full": 1.0, "level_s": 240.0, "trend_s": 240.0, "lasts_s": 30.0},
)


class ReplicaAtCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """One replica at its capacity: ``at_once`` requests running or waiting on average, ``kv_used`` (0..1) of
    its KV cache in use. Static counts are swept from ``least`` to ``most``.
    """

    at_once: float
    kv_used: float
    least: int
    most: int


def ladder(name: str, full: ReplicaAtCapacity) -> tuple[Choice, ...]:
    """The settings of the built-in policy ``name``, from careful to thrifty; raises :class:`KeyError`."""
    counts = np.unique(np.linspace(full.least, full.most, len(PARTS)).round().astype(int))
    concurrency = [part * full.at_once for part in PARTS]
    usual = TokenSaturation()
    thresholds = {"scale_up": usual.scale_up, "scale_down": usual.scale_down}
    # A threshold is at most 1, so a crowded cache has fewer steps.
    kv_used = dict.fromkeys(min(1.0, part * full.kv_used / usual.scale_up) for part in PARTS)
    steps: dict[str, Iterable[dict[str, Any]]] = {
        "static": [{"replicas": int(count)} for count in counts[::-1]],
        "target_tracking": [{"metric": "concurrency", "target": target} for target in concurrency],
        # Utilisation is at most 1, so the concurrency is swept.
        "panic_window": [{"concurrency": target, "utilisation": 1.0} for target in concurrency],
        "token_saturation": [{"kv": kv, **thresholds} for kv in kv_used],
        "predictive": CAREFUL_TO_THRIFTY,
    }
    return tuple({name: step} for step in steps[name])


# Mean replica count of the plan: with few replicas, rounding hides the differences. Where most of the prompts
# is cached a replica takes hundreds of requests per second: a load of more than so many has fewer replicas.
AIM = 10.0
MOST_REQUESTS = 100_000
SEED = 0
_PRECISION = 0.01
# Factors of the replica count that static fleets are run with.
LEAST, MOST_OF = 0.8, 1.8


class ReplicaSize(msgspec.Struct, frozen=True, kw_only=True):
    """``mu`` is the capacity of a replica in requests per second, ``full`` its state then.

    With ``factor`` times the load the offline plan has :data:`AIM` replicas on average, or the load has
    :data:`MOST_REQUESTS`.
    """

    mu: float
    factor: float
    full: ReplicaAtCapacity


def size_of(setup: PolicyBenchmarkSetup, lead_s: float) -> ReplicaSize:
    """The size at a start-up time of ``lead_s``. Raises :class:`ValueError` where no rate attains the SLO."""
    arrivals = setup.arrivals(1.0, SEED)
    document = setup.deployment(lead_s)
    load = trace_load(arrivals, ModelNames([MODEL])).loads[MODEL]
    spec = document.models[0]
    mu = attained_rate(document, spec, MODE, arrivals=lambda: arrivals, load=load, seed=SEED)

    asked = setup.problem(arrivals, mu, lead_s, since=setup.stretch.since)

    def mean(factor: float) -> float:
        return clairvoyant(replace(asked, demand=asked.demand * factor)).mean

    low, high, most = 0.01, 1.0, MOST_REQUESTS / len(arrivals)
    while mean(high) < AIM and high < most:
        low, high = high, min(2 * high, most)
    while high - low > _PRECISION * low:
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < AIM else (low, middle)
    return ReplicaSize(mu=mu, factor=round(low, 3), full=_full(setup, lead_s, mu, (low, mean(low)), SEED))


def _full(
    setup: PolicyBenchmarkSetup, lead_s: float, mu: float, sized: tuple[float, float], seed: int
) -> ReplicaAtCapacity:
    """The state of replicas at their capacity, on as many of the same requests.

    ``sized`` are the factor of the load and the replicas that the plan has for it.
    """
    factor, planned = sized
    arrivals = setup.arrivals(factor, seed)
    span_s = arrivals[-1].at - arrivals[0].at
    count = max(1, round(len(arrivals) / span_s / mu))
    fixed = {MODEL: Static(replicas=count)}
    record = simulate(setup.deployment(lead_s), fixed, arrivals, seed=seed)
    requests = record.requests[MODEL]
    served = requests.outcome == RequestOutcome.SERVED
    # By Little's law: each is there for so long, and holds on average its prompt and half of its answer.
    there_s = requests.e2e_s[served] - requests.queued_s[served]
    tokens = requests.input_tokens[served] + requests.output_tokens[served] / 2
    limits = profile(setup.profile).limits(1)
    replica_s = count * record.ends_at
    return ReplicaAtCapacity(
        at_once=float(requests.e2e_s[served].sum()) / replica_s,
        kv_used=min(1.0, float((there_s * tokens).sum()) / replica_s / limits.kv_tokens),
        least=max(1, round(LEAST * planned)),
        most=min(MOST, max(1, round(MOST_OF * planned))),
    )
