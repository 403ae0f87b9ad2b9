"""Capacity of one replica by simulation: the highest rate at which enough requests are within the SLO.

The engine model's ``mu`` is one of means, which hide that requests come in bursts and differ in length. A
plan made with it would miss what it promises. So the oracle's is found by trying rates on a fleet of a fixed
size, large enough (about ten replicas) that the bursts of single requests are shared as in the runs that are
judged.

What one replica of a mode attains with the requests of a trace, as tried in the twin."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import msgspec
import numpy as np

from policy.config.control import ModeSwitchConfig
from policy.config.deployment import Deployment, Mode, ModelSpec
from policy.engine.capacity import capability
from policy.engine.model import Limits, Workload
from policy.engine.profiles import max_request_tokens, shipped
from policy.scaling.policies.static import Static, StaticParameters
from sim.arrival import Arrival
from sim.planning.demand import met_alone
from sim.twin.run import simulate
from sim.workload.survey import Load


def rate_attaining(
    run: Callable[[float], float], low: float, high: float, attainment: float, precision: float = 0.01
) -> float:
    """The highest rate per replica at which ``run(rate)`` is at least ``attainment``, in requests per second.

    By bisection between ``low`` and ``high``; the rate returned has been tried, and one that is ``precision``
    (a fraction of it) higher has failed. The lower the rate, the longer a run: ``low`` itself is tried last,
    where all rates down to twice it have failed. Raises :class:`ValueError` where the edge is not between
    the two.
    """
    if not 0 < low < high or precision <= 0:
        raise ValueError(
            f"rates from {low:g} to {high:g} by {precision:g}: expected 0 < low < high, and 0 < precision"
        )
    if (shown := run(high)) >= attainment:
        raise ValueError(
            f"still at {high:g} requests per second {shown:.4g} attain, expected under {attainment:g}"
        )
    attains = False  # whether low is known to
    while not attains or high - low > precision * low:
        rate = (low + high) / 2 if attains or high > 2 * low else low
        if (shown := run(rate)) >= attainment:
            low, attains = rate, True
        elif rate > low:
            high = rate
        else:
            raise ValueError(
                f"already at {low:g} requests per second {shown:.4g} attain, expected {attainment:g}"
            )
    return low


# So many replicas share the bursts, as in the runs that are judged; a mode that has fewer is tried on those,
# and one request cannot be shared.
REPLICAS = 10

# Of the requests that are sent at each rate the first find the replicas idle, and are not counted. An answer
# takes many seconds, and one in a hundred is a figure only of many requests.
REQUESTS = 2000

LASTS_S = 60.0

# At low rates there are fewer, or it would take longer than the runs that are judged; and each request of a
# short trace is sent so often at most.
MOST_S = 4 * 3600.0

AGAIN = 100

WARM = 0.25

# So many different ones are sent.
SAMPLE = 10_000

PRECISION = 0.03

# Where the rate is looked for, in parts of the one at which a replica no longer keeps up.
_LOW, _HIGH = 0.02, 1.2

# The longest that a document may have: nothing is decided on a fleet that never changes.
_TICK_S = 300.0


def attained_rate(
    deployment: Deployment,
    spec: ModelSpec,
    mode: str,
    *,
    arrivals: Callable[[], Iterable[Arrival]],
    load: Load,
    seed: int,
) -> float:
    """Requests per second of one replica at which as many are within the SLO as are promised.

    ``arrivals`` are those of the model, of which some are sent at random instants. Of a model that is
    promised nothing it is the rate at which a replica no longer keeps up, by the engine model. Raises
    :class:`ValueError` where requests miss the SLO at any rate.
    """
    shape, slo = spec.shapes[spec.modes[mode].shape], spec.control.slo
    timing = shipped(spec, shape)
    assert timing.model is not None
    sample = _sample(arrivals, load)
    if met_alone(sample, timing.model, timing.limits, slo, max_request_tokens(spec, shape)) < slo.attainment:
        raise ValueError(f"fewer than {slo.attainment:g} of the requests would be within the SLO alone")
    edge = capability(timing, _means(sample, load, timing.limits), slo).mu_max
    if slo.ttft_p95_s is None and slo.itl_p95_s is None:
        return edge
    count = min(REPLICAS, spec.modes[mode].bounds.max, load.requests)
    fixed = _fixed(deployment, spec, mode, count)
    policies = {spec.name: Static(StaticParameters())}

    @cache
    def run(rate: float) -> float:
        record = simulate(fixed, policies, _retimed(sample, rate * count, seed), seed=seed)
        met = record.requests[spec.name].met
        return float(np.mean(met[int(WARM * len(met)) :]))

    try:
        return rate_attaining(run, _LOW * edge, _HIGH * edge, slo.attainment, PRECISION)
    except ValueError:
        # What is shared between requests takes nothing: then more than the engine model knows of is carried.
        if run(_HIGH * edge) >= slo.attainment:
            return _HIGH * edge
        raise


def _means(sample: Sequence[Arrival], load: Load, limits: Limits) -> Workload:
    """What requests are like on average, without those that fit no KV cache: they are refused at once."""
    held = [each for each in sample if each.input_tokens + each.output_tokens <= limits.kv_tokens]
    if len(held) == len(sample):
        requests, inputs, outputs = load.requests, load.input_tokens, load.output_tokens
    else:
        requests = len(held)
        inputs = sum(each.input_tokens for each in held)
        outputs = sum(each.output_tokens for each in held)
    return Workload(lam=1.0, input_tokens=inputs / requests, output_tokens=outputs / requests)


def _fixed(deployment: Deployment, spec: ModelSpec, mode: str, count: int) -> Deployment:
    """The model alone, with so many replicas of one mode, whatever the budget."""
    control = msgspec.structs.replace(spec.control, mode=ModeSwitchConfig(sleep="never"), tick_s=_TICK_S)
    only = {mode: Mode(shape=spec.modes[mode].shape, replicas=count)}
    model = msgspec.structs.replace(spec, modes=only, mode=mode, control=control)
    budget = msgspec.structs.replace(deployment.budget, gpus=None, cpus=None, watts=None, cost_per_h=None)
    return msgspec.structs.replace(deployment, models=(model,), budget=budget, upstreams=())


def _sample(arrivals: Callable[[], Iterable[Arrival]], load: Load) -> Sequence[Arrival]:
    """Requests from all over the trace, or from its middle where they belong to each other."""
    each = 1 if load.related else max(1, load.requests // SAMPLE)
    first = max(0, (load.requests - SAMPLE) // 2) if load.related else 0
    return list(itertools.islice(arrivals(), first, first + each * SAMPLE, each))


def _retimed(sample: Sequence[Arrival], rate: float, seed: int) -> Iterator[Arrival]:
    """The requests in their order, at random instants of that rate; a short sample more than once."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    at = 0.0
    for i in range(max(min(REQUESTS, AGAIN * len(sample)), int(rate * LASTS_S))):
        at += rng.expovariate(rate)
        if i and at > MOST_S:
            return
        yield sample[i % len(sample)]._replace(at=at)
