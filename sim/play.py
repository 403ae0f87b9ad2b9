"""Plays requests against replicas under one policy in virtual time: one seed, one outcome."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum

import msgspec

from sim.arrivals import Arrival
from sim.policy import Policy
from sim.replica import Engine, Replica

# From the choice of a replica to its queue, and from its first token to the gateway.
HOP_S = 0.0005
# Requests between two words of progress.
SAID_EACH = 250


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it: loads of any kind, the 95th percentile of TTFT in seconds, the busiest replica's
    requests over the mean, and how often at most one adapter was given another home within a minute."""

    loads: int
    ttft_p95_s: float
    load_max_over_mean: float
    moves_per_min: float


class _Kind(IntEnum):
    TICK = 0
    COMES = 1
    REACHES = 2
    DONE = 3
    FIRST = 4


def play(
    policy: Policy,
    engine: Engine,
    requests: Sequence[Arrival],
    replicas: int,
    said: Callable[[int], None] = lambda sent: None,
) -> Outcome:
    """Send ``requests``, in the order of arrival, where ``policy`` says; ``said`` hears how many are sent."""
    there = [Replica(engine, policy.rule(i)) for i in range(replicas)]
    events: list[tuple[float, int, _Kind, int]] = []
    order = itertools.count()
    where: dict[int, int] = {}
    ttft: list[float] = []

    def push(at: float, kind: _Kind, number: int) -> None:
        heapq.heappush(events, (at, next(order), kind, number))

    def begin(i: int, at: float) -> None:
        if (end := there[i].begin(at)) is not None:
            push(end, _Kind.DONE, i)
            if there[i].loading is not None:  # another may have gone for it
                policy.changed(i, at)

    push(0.0, _Kind.TICK, 0)
    push(requests[0].at, _Kind.COMES, 0)
    while where or len(ttft) < len(requests):
        at, _, kind, number = heapq.heappop(events)
        if kind is _Kind.TICK:
            if (due := policy.tick(there, at)) < float("inf"):
                push(due, _Kind.TICK, 0)
            for i in range(replicas):
                begin(i, at)
        elif kind is _Kind.COMES:
            where[number] = i = policy.choose(number, requests[number], at)
            policy.in_flight[i] += 1
            push(at + HOP_S, _Kind.REACHES, number)
            if number + 1 < len(requests):
                push(requests[number + 1].at, _Kind.COMES, number + 1)
            if not (number + 1) % SAID_EACH or number + 1 == len(requests):
                said(number + 1)
        elif kind is _Kind.REACHES:
            there[where[number]].submit(number, requests[number], at)
            begin(where[number], at)
        elif kind is _Kind.FIRST:
            ttft.append(at - requests[number].at)
            policy.first(number, at)
        else:
            done = there[number].finish(at)
            for each in done.first:
                push(at + HOP_S, _Kind.FIRST, each)
            for each in done.ended:
                policy.in_flight[where.pop(each)] -= 1
            if done.loaded:
                policy.changed(number, at)
            begin(number, at)
    counts = [each.requests for each in there]
    return Outcome(
        loads=sum(each.loads for each in there),
        ttft_p95_s=sorted(ttft)[-(-len(ttft) * 95 // 100) - 1],
        load_max_over_mean=max(counts) * replicas / len(requests),
        moves_per_min=policy.moves_per_min(),
    )
