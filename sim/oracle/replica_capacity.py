"""The capacity of one replica in the simulator: the highest rate at which enough requests meet the SLO.

The engine model's ``mu`` uses mean lengths and ignores bursts, so a plan made with it would miss the SLO.
Here rates are tried on a fleet of fixed size, about ten replicas, which share bursts as judged runs do.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np

from policy.config.control import ModeSwitchConfig
from policy.config.deployment import Deployment, Mode, ModelSpec
from policy.engine.builtin_profiles import max_request_tokens, shipped
from policy.engine.performance_model import BatchLimits, EngineLoad
from policy.engine.replica_capacity import capability
from policy.scaling.policies.static import Static
from sim.arrivals import Arrival
from sim.oracle.least_work import tokens_of
from sim.planning.demand import met_alone
from sim.simulator.run import simulate
from sim.workload.per_model_load import ModelLoad


def rate_attaining(
    run: Callable[[float], float], low: float, high: float, attainment: float, precision: float = 0.01
) -> float:
    """The highest rate per replica at which ``run(rate)`` is at least ``attainment``, in requests per second.

    By bisection between ``low`` and ``high``; the rate returned was tried, and a rate that is ``precision``
    (a fraction) higher failed. Low rates need long runs, so ``low`` itself is tried last. Raises
    :class:`ValueError` where the edge is not between the two.
    """
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


# Fleet size of a trial; a mode with fewer replicas uses those, and a trial of many requests fewer.
REPLICAS, LEAST_REPLICAS = 10, 3
MOST_REQUESTS = 50_000


class Trials(NamedTuple):
    """A trial sends at least so many ``requests`` for at least ``lasts_s``: a 99th percentile needs many.

    It ends after ``most_s``, all in simulated time.
    """

    requests: int = 2000
    lasts_s: float = 60.0
    most_s: float = 4 * 3600.0


TRIALS = Trials()
# How often each request of a short trace is repeated at most.
AGAIN = 100
# The first fraction of requests finds idle replicas and is not counted.
WARM = 0.25
# Distinct requests in a sample.
SAMPLE = 10_000
PRECISION = 0.03
# The search range, as fractions of the saturation rate.
_LOW, _HIGH = 0.02, 1.2
# The longest tick allowed: a fixed fleet needs no decisions.
_TICK_S = 300.0


def attained_rate(
    deployment: Deployment,
    spec: ModelSpec,
    mode: str,
    *,
    arrivals: Callable[[], Iterable[Arrival]],
    load: ModelLoad,
    seed: int,
    trials: Trials = TRIALS,
) -> float:
    """Requests per second of one replica at which the SLO's attainment is just met.

    ``arrivals`` are those of the model; a sample of them is sent at random instants. Without an SLO it is the
    engine model's saturation rate, with what prompts share computed once. Raises :class:`ValueError` where
    requests miss the SLO at any rate.
    """
    shape, slo = spec.shapes[spec.modes[mode].shape], spec.control.slo
    timing = shipped(spec, shape)
    assert timing.model is not None
    sample = _sample(arrivals, load)
    alone = met_alone(sample, timing.model, timing.limits, slo, max_request_tokens(spec, shape))
    if alone < slo.attainment:
        raise ValueError(
            f"only {alone:.2%} of the requests would be within the SLO if each had a replica for itself,"
            f" so {slo.attainment:.2%} cannot be attained"
        )
    edge = capability(timing, _means(sample, load, timing.limits), slo).mu_max
    if slo.ttft_p95_s is None and slo.itl_p95_s is None:
        return edge
    affordable = int(MOST_REQUESTS / (_HIGH * edge * trials.lasts_s))
    count = min(max(LEAST_REPLICAS, min(REPLICAS, affordable)), spec.modes[mode].bounds.max, load.requests)
    fixed = _fixed(deployment, spec, mode, count)
    policies = {spec.name: Static()}

    @cache
    def run(rate: float) -> float:
        record = simulate(fixed, policies, _retimed(sample, rate * count, seed, trials), seed=seed)
        met = record.requests[spec.name].met
        return float(np.mean(met[int(WARM * len(met)) :]))

    try:
        return rate_attaining(run, _LOW * edge, _HIGH * edge, slo.attainment, PRECISION)
    except ValueError:
        # A large pool of replicas may carry more than the engine model predicts for one.
        if run(_HIGH * edge) >= slo.attainment:
            return _HIGH * edge
        raise


def _means(sample: Sequence[Arrival], load: ModelLoad, limits: BatchLimits) -> EngineLoad:
    """The mean lengths of requests that fit the KV cache; the others are rejected at once.

    Of a prompt only what no earlier one of the sample shares takes time and memory of its own.
    """
    held = [each for each in sample if each.input_tokens + each.output_tokens <= limits.kv_tokens]
    if load.related:
        requests = len(held)
        inputs = int(tokens_of(held).new.sum())
        outputs = sum(each.output_tokens for each in held)
    elif len(held) == len(sample):
        requests, inputs, outputs = load.requests, load.input_tokens, load.output_tokens
    else:
        requests = len(held)
        inputs = sum(each.input_tokens for each in held)
        outputs = sum(each.output_tokens for each in held)
    return EngineLoad(lam=1.0, input_tokens=inputs / requests, output_tokens=outputs / requests)


def _fixed(deployment: Deployment, spec: ModelSpec, mode: str, count: int) -> Deployment:
    """The model alone, with ``count`` replicas of one mode and no budget."""
    control = msgspec.structs.replace(spec.control, mode=ModeSwitchConfig(sleep="never"), tick_s=_TICK_S)
    only = {mode: Mode(shape=spec.modes[mode].shape, replicas=count)}
    model = msgspec.structs.replace(spec, modes=only, mode=mode, control=control)
    budget = msgspec.structs.replace(deployment.budget, gpus=None, cpus=None, watts=None, cost_per_h=None)
    return msgspec.structs.replace(deployment, models=(model,), budget=budget, upstreams=())


def _sample(arrivals: Callable[[], Iterable[Arrival]], load: ModelLoad) -> Sequence[Arrival]:
    """Requests from all over the trace, or from its middle where they share sessions or prefixes."""
    each = 1 if load.related else max(1, load.requests // SAMPLE)
    first = max(0, (load.requests - SAMPLE) // 2) if load.related else 0
    return list(itertools.islice(arrivals(), first, first + each * SAMPLE, each))


def _retimed(sample: Sequence[Arrival], rate: float, seed: int, trials: Trials) -> Iterator[Arrival]:
    """The requests in order, at random instants of ``rate``; a short sample is repeated."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    at = 0.0
    for i in range(max(min(trials.requests, AGAIN * len(sample)), int(rate * trials.lasts_s))):
        at += rng.expovariate(rate)
        if i and at > trials.most_s:
            return
        yield sample[i % len(sample)]._replace(at=at)
