"""The benchmark of adapter placement: three policies on the same arrivals and simulated replicas."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import msgspec

from policy.engine.builtin_profiles import profile
from policy.engine.performance_model import Timing
from policy.stats.quantiles import nearest_rank
from sim.arrivals import Arrival
from sim.benchmarks.adapters.contenders import (
    LeastLoadedPlacement,
    PlacementPolicy,
    PlannedPlacement,
    ReplicaSetup,
    ServeMultiplex,
)
from sim.simulator.engine import EngineJob, TokenEventKind
from sim.workload.generators.request_distributions import geometric, zipf_weights

# From the choice of a replica to its queue, and from its first token to the gateway.
HOP_S = 0.0005
# Requests between two calls of ``progress``.
PROGRESS_EACH = 250
# A simulated engine of a few milliseconds a step.
PROFILE = "sim-small"
# Loading a rank-16 adapter from the page cache; the engine is blocked meanwhile.
LOAD_S = 0.02


class AdapterTraffic(NamedTuple):
    """The workload: ``requests`` at ``rate`` per second, the k-th adapter with weight ``k ** -exponent``.

    They come in calls of ``burst_size`` simultaneous requests for one adapter on average, such as several
    choices or tools of one client. ``prompt_tokens``, ``output_tokens`` and ``burst_size`` are means of
    geometric distributions; prompts and answers are short, as in classification.
    """

    adapters: int
    exponent: float
    rate: float
    requests: int
    burst_size: float
    seed: int
    prompt_tokens: int = 64
    output_tokens: int = 8


def arrivals(traffic: AdapterTraffic) -> list[Arrival]:
    """The requests in order of arrival; which adapters are popular is drawn, too."""
    rng = random.Random(f"arrivals {traffic.seed}")  # noqa: S311 - a reproducible workload
    names = [str(number) for number in range(traffic.adapters)]
    rng.shuffle(names)
    weights = zipf_weights(traffic.adapters, traffic.exponent)
    drawn = iter(rng.choices(names, weights, k=traffic.requests))
    more = 1.0 - 1.0 / traffic.burst_size
    made: list[Arrival] = []
    at, adapter = 0.0, ""
    for _ in range(traffic.requests):
        if not made or rng.random() >= more:
            at += rng.expovariate(traffic.rate / traffic.burst_size)
            adapter = next(drawn)
        prompt, output = (geometric(rng, mean) for mean in (traffic.prompt_tokens, traffic.output_tokens))
        made.append(Arrival(at, prompt, output, adapter=adapter))
    return made


class PlacementRunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result: adapter loads, the 95th percentile of TTFT in seconds, the busiest replica's requests over
    the mean, and the most placement moves within a minute.
    """

    loads: int
    ttft_p95_s: float
    load_max_over_mean: float
    moves_per_min: float


class _Due(IntEnum):
    TICK = 0
    COMES = 1
    REACHES = 2
    NEWS = 3
    FIRST = 4


def run_events(
    policy: PlacementPolicy,
    equipment: ReplicaSetup,
    requests: Sequence[Arrival],
    replicas: int,
    progress: Callable[[int], None] = lambda sent: None,
) -> PlacementRunResult:
    """Route ``requests``, in order of arrival, by ``policy``; ``progress`` gets how many were sent."""
    there = [equipment.engine(policy.slot_rules) for _ in range(replicas)]
    counts = [0] * replicas
    order = itertools.count()
    events = [(0.0, next(order), _Due.TICK, 0, 0), (requests[0].at, next(order), _Due.COMES, 0, 0)]
    where: dict[int, int] = {}
    ttft: list[float] = []
    reaches = 0.0
    # By replica: the adapter changes that were last seen, and the event that is valid.
    loaded, valid = [0] * replicas, [0] * replicas

    def push(at: float, due: _Due, number: int, version: int = 0) -> None:
        heapq.heappush(events, (at, next(order), due, number, version))

    def watch(i: int, at: float) -> None:
        """Take the news of a replica, and come back for the next."""
        for event in there[i].advance(at):
            if event.kind is TokenEventKind.FIRST:
                push(event.at + HOP_S, _Due.FIRST, event.number)
            else:
                policy.in_flight[where.pop(event.number)] -= 1
        if there[i].adapter_changes != loaded[i]:
            loaded[i] = there[i].adapter_changes
            policy.changed(i, at)
        valid[i] += 1
        if (news_at := there[i].next_at()) < math.inf:
            push(news_at, _Due.NEWS, i, valid[i])

    while where or len(ttft) < len(requests):
        at, _, due, number, version = heapq.heappop(events)
        if due is _Due.TICK:
            for each in there:
                each.catch_up(at)
            if (next_at := policy.tick(there, at)) < math.inf:
                push(next_at, _Due.TICK, 0)
            for i in range(replicas):
                there[i].look_ahead(at)
                watch(i, at)
        elif due is _Due.COMES:
            where[number] = i = policy.choose(number, requests[number], at)
            policy.in_flight[i] += 1
            # Also those of one call come one after the other: the first does not wait for them.
            reaches = max(at + HOP_S, math.nextafter(reaches, math.inf))
            push(reaches, _Due.REACHES, number)
            if number + 1 < len(requests):
                push(requests[number + 1].at, _Due.COMES, number + 1)
            if not (number + 1) % PROGRESS_EACH or number + 1 == len(requests):
                progress(number + 1)
        elif due is _Due.REACHES:
            i, arrival = where[number], requests[number]
            counts[i] += 1
            there[i].submit(
                EngineJob(number, arrival.input_tokens, arrival.output_tokens, arrival.adapter), at
            )
            watch(i, at)
        elif due is _Due.FIRST:
            ttft.append(at - requests[number].at)
            policy.first(number, at)
        elif version == valid[number]:
            watch(number, at)
    return PlacementRunResult(
        loads=sum(each.adapter_loads for each in there),
        ttft_p95_s=nearest_rank(ttft, 0.95),
        load_max_over_mean=max(counts) * replicas / len(requests),
        moves_per_min=policy.moves_per_min(),
    )


class ReplicasAndSlots(NamedTuple):
    """The number of replicas, and of adapter slots of each."""

    replicas: int
    slots: int


class PlacementComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of each policy, by name."""

    policies: dict[str, PlacementRunResult]


# Each starts with the same seed.
_POLICIES: dict[str, Callable[[int, random.Random, ReplicaSetup], PlacementPolicy]] = {
    "placement": PlannedPlacement,
    "least_loaded": lambda replicas, rng, equipment: LeastLoadedPlacement(replicas, rng),
    "serve_multiplex": lambda replicas, rng, equipment: ServeMultiplex(replicas, rng),
}
NAMES = tuple(_POLICIES)


def compare_seeds(
    asked: AdapterTraffic,
    fleet: ReplicasAndSlots,
    seeds: int,
    progress: Callable[[str, int], None] = lambda name, sent: None,
) -> list[PlacementComparison]:
    """One comparison for each of ``seeds`` seeds, from that of ``asked`` on."""
    return [compare(asked._replace(seed=asked.seed + i), fleet, progress) for i in range(seeds)]


def compare(
    asked: AdapterTraffic,
    fleet: ReplicasAndSlots,
    progress: Callable[[str, int], None] = lambda name, sent: None,
) -> PlacementComparison:
    """Simulate every policy on the same arrivals; ``progress`` gets a policy's name and requests sent."""
    found = profile(PROFILE)
    equipment = ReplicaSetup(Timing(limits=found.limits(1), model=found.model), fleet.slots, LOAD_S)
    requests = arrivals(asked)
    outcomes: dict[str, PlacementRunResult] = {}
    for name, make in _POLICIES.items():
        policy = make(fleet.replicas, random.Random(f"policy {asked.seed}"), equipment)  # noqa: S311 - chance, not secrecy
        outcomes[name] = run_events(policy, equipment, requests, fleet.replicas, partial(progress, name))
    return PlacementComparison(policies=outcomes)
