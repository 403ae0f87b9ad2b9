"""A fleet as a fluid: requests arrive by the second, replicas take so many, what is left over waits.

Small and exact, to judge policies against each other and against a plan that knows the future. Safety's hold
is applied to all of them alike: a replica goes after it was not asked for during ``max(lead, 60 s)``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from policy.control import Objective
from policy.scaling.view import Capability, Policy, Supply, View
from policy.signals import Demand, Quantiles, Rates, ReplicaFigures, Signals

MU = 4.0  # requests per second of one replica
STAY_S = 6.0  # how long a request runs
OBJECTIVE_S = 2.0
KV_TOKENS = 60_000
LENGTH = 1150.0
TICK_S = 5


@dataclass(frozen=True)
class Outcome:
    """What a plan cost, in replica-seconds, and the part of the requests that waited too long."""

    replica_s: float
    missed: float


def poisson(rng: random.Random, mean: float) -> int:
    if mean > 50:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


def served(arrivals: Sequence[float], ready: Sequence[int], on: Sequence[int]) -> Outcome:
    """The outcome of a plan of which ``ready`` replicas serve and ``on`` are paid for, second by second."""
    queue, missed = 0.0, 0.0
    for came, serving in zip(arrivals, ready, strict=True):
        queue = max(0.0, queue + came - serving * MU)
        if queue > OBJECTIVE_S * serving * MU:
            missed += came
    return Outcome(float(sum(on)), missed / max(1.0, sum(arrivals)))


def clairvoyant(arrivals: Sequence[float], lead_s: int, most: int = 64) -> Outcome:
    """The fewest replicas that keep every wait within the objective, with layers that stay on through gaps.

    A layer that is needed again within ``lead_s`` stays on: its start would cost as much.
    """
    needed = _fewest(arrivals, most)
    on = list(needed)
    for layer in range(1, max(needed) + 1):
        last = None
        for at, count in enumerate(needed):
            if count < layer:
                continue
            if last is not None and 1 < at - last <= lead_s + 1:
                for gap in range(last + 1, at):
                    on[gap] = max(on[gap], layer)
            last = at
    ready = list(on)
    paid = sum(on)
    for before, after in zip(on, on[1:], strict=False):
        paid += max(0, after - before) * lead_s  # paid for while it starts, too
    outcome = served(arrivals, ready, on)
    return Outcome(float(paid), outcome.missed)


def _fewest(arrivals: Sequence[float], most: int) -> list[int]:
    """Greedy from the end: the queue that may be left over is worked off by what serves afterwards."""
    # The mean over the objective's length, ahead: what may wait that long needs no replica at once.
    window = int(OBJECTIVE_S)
    counts = []
    queue = 0.0
    for at, came in enumerate(arrivals):
        ahead = arrivals[at : at + window + 1]
        count = math.ceil((queue + sum(ahead)) / (len(ahead) * MU) - 1e-9)
        count = max(1, min(count, most))
        queue = max(0.0, queue + came - count * MU)
        counts.append(count)
    return counts


def played(policy: Policy, arrivals: Sequence[float], lead_s: int, *, first: int, most: int = 64) -> Outcome:
    """The outcome of ``policy``, decided every :data:`TICK_S`, from ``first`` replicas on."""
    hold_s = max(lead_s, 60)
    serving, starting = first, list[int]()
    count, memory = first, None
    wanted: list[tuple[int, int]] = []
    queue, missed, paid = 0.0, 0.0, 0.0
    cum = [0.0]
    busy = [0.0]
    waits: list[float] = []
    for at, came in enumerate(arrivals):
        cum.append(cum[-1] + came)
        serving += sum(1 for when in starting if when <= at)
        starting = [when for when in starting if when > at]
        paid += serving + len(starting)
        before = queue + came
        queue = max(0.0, before - serving * MU)
        done = before - queue
        busy.append(busy[-1] + done * STAY_S + queue)
        wait = queue / (serving * MU) if serving else math.inf
        waits.append(min(wait, 600.0))
        if wait > OBJECTIVE_S:
            missed += came
        if at % TICK_S:
            continue
        view = _view(at + 1, count, serving, starting, cum, busy, waits, queue, done, lead_s, most)
        proposal = policy.decide(view, memory)
        memory = proposal.memory
        wanted = [(when, asked) for when, asked in wanted if when > at - hold_s] + [(at, proposal.count)]
        if proposal.count > count:
            count = min(proposal.count, most, 2 * count)
            starting += [at + lead_s] * (count - serving - len(starting))
        elif at >= hold_s and (least := max(asked for _, asked in wanted)) < count:
            count = max(least, math.ceil(count / 2))
            gone = serving + len(starting) - count
            while gone and starting:
                starting.pop()
                gone -= 1
            serving -= gone
    return Outcome(paid, missed / max(1.0, sum(arrivals)))


def _view(
    at: int,
    count: int,
    serving: int,
    starting: list[int],
    cum: list[float],
    busy: list[float],
    waits: list[float],
    queue: float,
    done: float,
    lead_s: int,
    most: int,
) -> View:
    def rate(window: int) -> float:
        return (cum[-1] - cum[max(0, len(cum) - 1 - window)]) / min(window, len(cum) - 1)

    def level(window: int) -> float:
        return (busy[-1] - busy[max(0, len(busy) - 1 - window)]) / min(window, len(busy) - 1)

    p95 = sorted(waits[-60:])[int(0.95 * (min(60, len(waits)) - 1))]
    used = min(1.0, done * STAY_S * LENGTH / max(1, serving) / KV_TOKENS)
    nothing = Rates(last_6_s=0, last_20_s=0, last_60_s=0, last_600_s=0)
    demand = Demand(
        age_s=0.5,
        arrivals=Rates(last_6_s=rate(6), last_20_s=rate(20), last_60_s=rate(60), last_600_s=rate(600)),
        refused=nothing,
        concurrency=Rates(last_6_s=level(6), last_20_s=level(20), last_60_s=level(60), last_600_s=level(600)),
        queued=int(queue),
        ttft=Quantiles(count=100, p50=p95, p90=p95, p95=p95, p99=p95),
        input_tokens=1000.0,
        output_tokens=300.0,
    )
    replicas = tuple(ReplicaFigures(id=str(i), age_s=0.5, kv_used=used) for i in range(serving))
    return View(
        at=1e9 + at,
        tick_s=TICK_S,
        model="m",
        mode="multi-replica",
        count=count,
        least=1,
        most=most,
        supply=Supply(
            wanted=count, serving=serving, starting_s=tuple(max(0.0, when - at) for when in starting)
        ),
        signals=Signals(demand=demand, replicas=replicas),
        capability=Capability(mu=MU, mu_max=MU / 0.85, kv_tokens=KV_TOKENS, seats=64),
        lead_s=float(lead_s),
        slo=Objective(ttft_p95_s=OBJECTIVE_S),
    )
