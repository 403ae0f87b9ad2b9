"""Sizing of the benchmark: the capacity per replica, its metrics at that rate, and the load."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from policy.engine.profiles import profile
from policy.scaling.policies.static import Static, StaticParameters
from sim.benchmarks.policies.run import problem
from sim.benchmarks.policies.setup import MODE, MODEL, MOST, Setup
from sim.oracle.clairvoyant import clairvoyant
from sim.oracle.replica_capacity import attained_rate
from sim.results.sweeps import Full
from sim.twin.record import Outcome
from sim.twin.run import simulate
from sim.workload.model_names import ModelNames
from sim.workload.survey import survey

# Of replicas, on average: integrality hides everything where a plan has few of them.
AIM = 10.0
_PRECISION = 0.01
# Factors of the replica count that static fleets are run with.
LEAST, MOST_OF = 0.8, 1.8


class ReplicaSize(msgspec.Struct, frozen=True, kw_only=True):
    """One replica attains what is promised at ``mu`` requests per second, and is ``full`` then.

    With ``factor`` times the load a plan that knows the future has :data:`AIM` replicas on average.
    """

    mu: float
    factor: float
    full: Full


def size_of(ground: Setup, lead_s: float, seed: int = 0) -> ReplicaSize:
    """The size for starts of ``lead_s``. Raises :class:`ValueError` where no rate attains."""
    arrivals = ground.arrivals(1.0, seed)
    document = ground.deployment(lead_s)
    load = survey(arrivals, ModelNames([MODEL])).loads[MODEL]
    spec = document.models[0]
    mu = attained_rate(document, spec, MODE, arrivals=lambda: arrivals, load=load, seed=seed)

    asked = problem(ground, arrivals, mu, lead_s, since=ground.stretch.since)

    def mean(factor: float) -> float:
        return clairvoyant(replace(asked, demand=asked.demand * factor)).mean

    low, high = 0.01, 1.0
    while mean(high) < AIM:
        low, high = high, 2 * high
    while high - low > _PRECISION * low:
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < AIM else (low, middle)
    return ReplicaSize(mu=mu, factor=round(low, 3), full=_full(ground, lead_s, mu, low, seed))


def _full(ground: Setup, lead_s: float, mu: float, factor: float, seed: int) -> Full:
    """What replicas show that take what they attain, on average: of the same requests, as many as that."""
    arrivals = ground.arrivals(factor, seed)
    span_s = arrivals[-1].at - arrivals[0].at
    count = max(1, round(len(arrivals) / span_s / mu))
    fixed = {MODEL: Static(StaticParameters(replicas=count))}
    record = simulate(ground.deployment(lead_s), fixed, arrivals, seed=seed)
    requests = record.requests[MODEL]
    served = requests.outcome == Outcome.SERVED
    # By Little's law: each is there for so long, and holds on average its prompt and half of its answer.
    there_s = requests.e2e_s[served] - requests.queued_s[served]
    tokens = requests.input_tokens[served] + requests.output_tokens[served] / 2
    limits = profile(ground.profile).limits(1)
    replica_s = count * record.ends_at
    return Full(
        at_once=float(requests.e2e_s[served].sum()) / replica_s,
        kv_used=min(1.0, float((there_s * tokens).sum()) / replica_s / limits.kv_tokens),
        least=max(1, round(LEAST * AIM)),
        most=min(MOST, round(MOST_OF * AIM)),
    )
