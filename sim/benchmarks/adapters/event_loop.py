"""The event loop of the adapter benchmark: requests on simulated replicas under one policy."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from enum import IntEnum

import msgspec

from policy.stats.quantiles import nearest_rank
from sim.arrival import Arrival
from sim.benchmarks.adapters.contenders import PlacementPolicy, ReplicaSetup
from sim.twin.engine import Job, Kind

# From the choice of a replica to its queue, and from its first token to the gateway.
HOP_S = 0.0005
# Requests between two words of progress.
PROGRESS_EACH = 250


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it: loads of any kind, the 95th percentile of TTFT in seconds, the busiest replica's
    requests over the mean, and how often at most one adapter was given another home within a minute."""

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
) -> RunOutcome:
    """Route ``requests``, in order of arrival, by ``policy``; ``progress`` gets how many were sent."""
    there = [equipment.engine(policy.slot_rules) for _ in range(replicas)]
    counts = [0] * replicas
    order = itertools.count()
    events = [(0.0, next(order), _Due.TICK, 0, 0), (requests[0].at, next(order), _Due.COMES, 0, 0)]
    where: dict[int, int] = {}
    ttft: list[float] = []
    reaches = 0.0
    # Of each replica what it had loaded when that was last loaded, and which of its events is not void.
    loaded, valid = [0] * replicas, [0] * replicas

    def push(at: float, due: _Due, number: int, version: int = 0) -> None:
        heapq.heappush(events, (at, next(order), due, number, version))

    def watch(i: int, at: float) -> None:
        """Take the news of a replica, and come back for the next."""
        for event in there[i].advance(at):
            if event.kind is Kind.FIRST:
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
            there[i].submit(Job(number, arrival.input_tokens, arrival.output_tokens, arrival.adapter), at)
            watch(i, at)
        elif due is _Due.FIRST:
            ttft.append(at - requests[number].at)
            policy.first(number, at)
        elif version == valid[number]:
            watch(number, at)
    return RunOutcome(
        loads=sum(each.adapter_loads for each in there),
        ttft_p95_s=nearest_rank(ttft, 0.95),
        load_max_over_mean=max(counts) * replicas / len(requests),
        moves_per_min=policy.moves_per_min(),
    )
