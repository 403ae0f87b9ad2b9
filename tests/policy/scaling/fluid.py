"""A fleet as a fluid: requests arrive by the second, replicas take so many, what is left over waits.

Small and exact, to judge policies against each other and against a plan that knows the future. Nobody is ever
refused, so a shortage is felt until its last request was served. Safety's step and hold bind all policies
alike: at most twice as many at once, and one goes after it was not asked for during ``max(lead, 60 s)``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from policy.config.control import SloConfig
from policy.engine.capacity import Capability
from policy.scaling.view import Policy, Supply, View
from policy.signals.types import Demand, LatencyQuantiles, Rates, ReplicaSample, Signals

MU = 4  # requests per second of one replica
STAY_S = 6.0  # how long a request runs
OBJECTIVE_S = 2  # how long it may wait
KV_TOKENS = 52_000
LENGTH = 1150.0
TICK_S = 5
MOST = 64


@dataclass(frozen=True)
class Outcome:
    """What a plan cost in replica-seconds, starts included, and the part of requests that waited too long."""

    replica_s: float
    missed: float


def poisson(rng: random.Random, mean: float) -> int:
    """So many arrivals in a second; of many the normal approximation."""
    if mean > 50:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


def day(
    seed: int,
    *,
    seconds: int = 7200,
    mean: float = 40.0,
    swing: float = 0.6,
    period: int = 3600,
    bursts: int = 0,
) -> list[int]:
    """Days of ``period`` seconds, each from its lowest.

    With bursts of a fifth to a third of the mean, that rise in two minutes and last for two to seven.
    """
    rng = random.Random(seed)  # noqa: S311 - a load, no secret
    begun = [(rng.uniform(0, seconds), rng.uniform(0.2, 0.35), rng.uniform(120, 400)) for _ in range(bursts)]
    rise_s = 120.0

    def height(elapsed: float, lasts: float) -> float:
        if elapsed <= 0:
            return 0.0
        return min(1.0, elapsed / rise_s) * math.exp(-max(0.0, elapsed - lasts - rise_s) / rise_s)

    found = []
    for at in range(seconds):
        rate = 1.0 - swing * math.cos(2 * math.pi * at / period)
        rate += sum(part * height(at - since, lasts) for since, part, lasts in begun)
        found.append(poisson(rng, mean * rate))
    return found


def clairvoyant(arrivals: Sequence[int], lead_s: int) -> float:
    """The fewest replica-seconds with which nobody waits longer than the objective, by dynamic programming.

    It may change the count every :data:`TICK_S`, as policies may, and pays ``lead_s`` for each start.
    """
    top = math.ceil(1.7 * max(window_means(arrivals, 20)) / MU) + 2
    counts = np.arange(1, top + 1)[:, None]
    room = OBJECTIVE_S * MU * counts
    queues = np.arange(OBJECTIVE_S * MU * top + 1)[None, :]
    # cost[n, q]: the least so far that ends with n replicas and at most q that wait.
    cost = np.zeros((top, queues.size))
    for at, came in enumerate(arrivals):
        if at and at % TICK_S == 0:
            down = np.minimum.accumulate(cost[::-1], axis=0)[::-1]
            up = np.minimum.accumulate(cost - counts * lead_s, axis=0) + counts * lead_s
            cost = np.minimum(down, up)
        before = np.minimum(queues, room) + counts * MU - came
        moved = np.take_along_axis(cost, np.clip(before, 0, queues.size - 1), axis=1)
        cost = np.where(before < 0, np.inf, moved) + counts
    return float(cost.min())


def layered(arrivals: Sequence[int], lead_s: int) -> float:
    """The replica-seconds of whole replicas for the rate of each minute, each of which is kept through a gap
    of up to ``lead_s`` and started in time after a longer one.

    The clairvoyant plan by which ``predictive`` was first judged. It has no use for what may wait, nor for
    what the seconds of a minute have in store, and costs 4 % more than :func:`clairvoyant`.
    """
    total, half = [0, *accumulate(arrivals)], 30
    spans = [(max(0, at - half), min(len(arrivals), at + half)) for at in range(len(arrivals))]
    needs = [math.ceil((total[end] - total[begin]) / (end - begin) / MU) for begin, end in spans]
    cost = 0
    for layer in range(1, max(needs) + 1):
        used = [at for at, need in enumerate(needs) if need >= layer]
        cost += len(used) + (lead_s if used[0] else 0)
        cost += sum(min(after - before - 1, lead_s) for before, after in pairwise(used))
    return float(cost)


def window_means(arrivals: Sequence[int], window: int) -> list[float]:
    """The means over each window."""
    total = [0, *accumulate(arrivals)]
    return [(total[i + window] - total[i]) / window for i in range(len(arrivals) - window)]


def played(policy: Policy, arrivals: Sequence[int], lead_s: int) -> Outcome:
    """The outcome of ``policy``, which begins with what the first minute needs."""
    return _played(policy, arrivals, lead_s)[0]


def changes(policy: Policy, arrivals: Sequence[int], lead_s: int) -> int:
    """How often ``policy`` changed the count of replicas that are aimed for."""
    return sum(before != after for before, after in pairwise(_played(policy, arrivals, lead_s)[1]))


def _played(policy: Policy, arrivals: Sequence[int], lead_s: int) -> tuple[Outcome, list[int]]:
    fleet = _Fleet(lead_s, serving=math.ceil(1.2 * sum(arrivals[:60]) / 60 / MU))
    memory, counts = None, [fleet.count]
    for at, came in enumerate(arrivals):
        fleet.serve(at, came)
        if at % TICK_S == 0:
            proposal = policy.decide(fleet.view(), memory)
            memory = proposal.memory
            fleet.steer(proposal.count)
            counts.append(fleet.count)
    return Outcome(fleet.paid, fleet.missed / sum(arrivals)), counts


@dataclass
class _Fleet:
    lead_s: int
    serving: int
    at: int = 0
    starting: list[int] = field(default_factory=list)
    queue: float = 0.0
    done: float = 0.0
    paid: float = 0.0
    missed: float = 0.0
    came: list[float] = field(default_factory=lambda: [0.0])
    busy: list[float] = field(default_factory=lambda: [0.0])
    waits: list[float] = field(default_factory=list)
    asked: list[tuple[int, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.serving + len(self.starting)

    def serve(self, at: int, came: int) -> None:
        self.at = at
        self.serving += sum(1 for ready in self.starting if ready <= at)
        self.starting = [ready for ready in self.starting if ready > at]
        self.paid += self.count
        before = self.queue + came
        self.queue = max(0.0, before - self.serving * MU)
        self.done = before - self.queue
        self.came.append(self.came[-1] + came)
        self.busy.append(self.busy[-1] + self.done * STAY_S + self.queue)
        self.waits.append(self.queue / (self.serving * MU))
        if self.waits[-1] > OBJECTIVE_S:
            self.missed += came

    def steer(self, wanted: int) -> None:
        hold_s = max(self.lead_s, 60)
        self.asked = [(at, count) for at, count in self.asked if at > self.at - hold_s] + [(self.at, wanted)]
        if wanted > self.count:
            more = min(wanted, MOST, 2 * self.count) - self.count
            self.starting += [self.at + self.lead_s] * more
        elif self.at >= hold_s:
            least = max(count for _, count in self.asked)
            for _ in range(min(self.count - least, self.count // 2)):
                if self.starting:
                    self.starting.pop()
                else:
                    self.serving -= 1

    def view(self) -> View:
        p95 = sorted(self.waits[-60:])[int(0.95 * (min(60, len(self.waits)) - 1))]
        used = min(1.0, self.done * STAY_S * LENGTH / self.serving / KV_TOKENS)
        demand = Demand(
            age_s=0.5,
            arrivals=_rates(self.came),
            refused=Rates(last_6_s=0.0, last_20_s=0.0, last_60_s=0.0, last_600_s=0.0),
            concurrency=_rates(self.busy),
            queued=int(self.queue),
            ttft=LatencyQuantiles(count=100, p50=p95, p90=p95, p95=p95, p99=p95),
            input_tokens=1000.0,
            output_tokens=300.0,
        )
        figures = tuple(ReplicaSample(id=str(i), age_s=0.5, kv_used=used) for i in range(self.serving))
        starting_s = tuple(float(ready - self.at - 1) for ready in self.starting)
        return View(
            at=1e9 + self.at,
            tick_s=TICK_S,
            model="m",
            mode="multi-replica",
            count=self.count,
            least=1,
            most=MOST,
            supply=Supply(wanted=self.count, serving=self.serving, starting_s=starting_s),
            signals=Signals(demand=demand, replicas=figures),
            capability=Capability(mu=MU, mu_max=MU / 0.85, kv_tokens=KV_TOKENS, seats=64),
            lead_s=self.lead_s,
            slo=SloConfig(ttft_p95_s=OBJECTIVE_S),
        )


def _rates(sums: Sequence[float]) -> Rates:
    def mean(window: int) -> float:
        some = min(window, len(sums) - 1)
        return (sums[-1] - sums[-1 - some]) / some

    return Rates(last_6_s=mean(6), last_20_s=mean(20), last_60_s=mean(60), last_600_s=mean(600))
