"""In closed loop with a simulated server: it is kept full, and its own queue stays short."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import pytest

from policy.routing.concurrency_limit import ConcurrencyLimit, ServerQueue, WholeAnswer

DEMAND, SECONDS = 1000, 240


class Found(NamedTuple):
    """``bounds`` of all gateways and the server's ``waiting`` requests, second by second."""

    served: int
    bounds: list[int]
    waiting: list[int]

    def settled(self, since: int) -> tuple[float, float]:
        """Means of bound and waiting from this second on."""
        count = len(self.bounds[since:])
        return sum(self.bounds[since:]) / count, sum(self.waiting[since:]) / count


class Site:
    """Gateways that always have :data:`DEMAND` requests, before a server with ``slots`` at an instant."""

    def __init__(self, slots: Callable[[float], int], gateways: int, *, limited: bool = True) -> None:
        self.slots = slots
        self.limits = [ConcurrencyLimit(0.0) for _ in range(gateways)]
        self.in_flight, self.unanswered = [0] * gateways, [0] * gateways
        self.queue: deque[tuple[int, float]] = deque()
        self.running = 0
        self.limited = limited

    def run(self, *, by: str, service_s: tuple[float, float], prompts_grow_at: float = math.inf) -> Found:
        rng = random.Random(3)  # noqa: S311 - a workload
        found = Found(0, [], [])
        ends: list[tuple[float, int, str, int, float, float]] = [
            (1.0 + 0.3 * i, i, "read", i, 0.0, 0.0) for i in range(len(self.limits))
        ]
        at = served = number = 0.0
        while at < SECONDS:
            for i, limit in enumerate(self.limits):
                free = (limit.limit if self.limited else DEMAND) - self.in_flight[i]
                self.queue += [(i, at)] * free
                self.in_flight[i] += max(0, free)
                self.unanswered[i] += max(0, free)
            while self.queue and self.running < self.slots(at):
                i, sent = self.queue.popleft()
                self.running += 1
                number += 2
                first = at + rng.uniform(0.02, 0.04) * (15.0 if at > prompts_grow_at else 1.0)
                generating_s = rng.uniform(*service_s)
                tokens = 100.0 * generating_s * rng.uniform(0.9, 1.1)
                heapq.heappush(ends, (first, int(number), "first", i, sent, tokens))
                heapq.heappush(ends, (first + generating_s, int(number) + 1, "end", i, sent, tokens))
            at, _, kind, i, sent, tokens = heapq.heappop(ends)
            if kind == "first":
                self.unanswered[i] -= 1
                if by == "delays":
                    self.limits[i].first(at - sent, at)
            elif kind == "end":
                self.limits[i].whole(WholeAnswer(at - sent, tokens, at))
                self.in_flight[i] -= 1
                self.running -= 1
                served += 1
            else:
                if by == "metrics":
                    self.limits[i].follow(ServerQueue(self.running, len(self.queue)), self.in_flight[i], at)
                elif by == "whole answers":
                    self.limits[i].estimate_whole(self.in_flight[i], self.in_flight[i], at)
                else:
                    self.limits[i].estimate(self.unanswered[i], self.in_flight[i], self.in_flight[i], at)
                number += 2
                heapq.heappush(ends, (at + 1.0, int(number), "read", i, 0.0, 0.0))
                if i == 0:
                    found.bounds.append(sum(limit.limit for limit in self.limits))
                    found.waiting.append(len(self.queue))
        return found._replace(served=int(served))


def changes(at: float) -> int:
    return 64 if at < 60 else 128 if at < 140 else 32


@pytest.mark.slow
@pytest.mark.parametrize("by", ["metrics", "delays", "whole answers"])
@pytest.mark.parametrize(
    ("slots", "service_s", "last", "gateways"),
    [
        (lambda _: 8, (0.5, 1.5), 8, 1),
        (lambda _: 64, (0.5, 1.5), 64, 1),
        (lambda _: 64, (3.0, 15.0), 64, 1),
        (lambda _: 600, (0.5, 1.5), 600, 1),
        (changes, (0.5, 1.5), 32, 1),
        (lambda _: 64, (0.5, 1.5), 64, 2),
    ],
    ids=["few", "usual", "long answers", "many", "changing", "two gateways"],
)
def test_the_server_is_kept_full_with_a_short_queue(
    slots: Callable[[float], int],
    service_s: tuple[float, float],
    last: int,
    gateways: int,
    by: str,
) -> None:
    found = Site(slots, gateways).run(by=by, service_s=service_s)
    unbounded = Site(slots, gateways, limited=False).run(by=by, service_s=service_s)
    assert found.served >= 0.97 * unbounded.served
    bound, waiting = found.settled(180)
    # Gateways without the server's metrics do not know of each other's requests. Whole answers show a long
    # queue only.
    most, more = (1.0, 8) if by == "whole answers" else (0.1, 2)
    if gateways > 1 and by != "metrics":
        most = 1.2
    assert 0.9 * last <= bound <= (1 + most) * last + more
    assert waiting <= most * last + more


@pytest.mark.parametrize(
    ("every_s", "tokens"),
    [(0.1, (20.0,)), (0.1, (0.0, 5.0)), (20.0, (5.0, 50.0))],
    ids=["alike", "none", "few"],
)
def test_whole_answers_that_tell_nothing_leave_the_bound_as_it_is(
    every_s: float, tokens: tuple[float, ...]
) -> None:
    limit, bounds = ConcurrencyLimit(0.0), []
    for i in range(int(700 / every_s)):
        at = 1.0 + every_s * i
        limit.whole(WholeAnswer(2.0, tokens[i % len(tokens)], at))
        limit.estimate_whole(256, 256, at)
        bounds.append(limit.limit)
    assert bounds[-1] == 256
    # While the least delay is to be measured it is lower, for a minute of five at most.
    assert bounds.count(204) <= 0.25 * len(bounds)


def test_a_measurement_by_the_other_kind_of_answers_is_given_up() -> None:
    limit = ConcurrencyLimit(0.0)
    limit.whole(WholeAnswer(2.0, 5.0, 1.0))
    limit.estimate_whole(1, 1, 300.5)
    assert limit.limit == 204
    limit.estimate(0, 1, 1, 301.0)
    assert limit.limit == 256


def test_a_first_stream_after_whole_answers_leaves_the_bound_as_it_is() -> None:
    limit = ConcurrencyLimit(0.0)
    for i in range(200):
        limit.whole(WholeAnswer(1.0 + 0.01 * (i % 50), 10.0 + i % 50, 1.0 + i))
        limit.estimate_whole(4, 4, 1.5 + i)
    before = limit.limit
    limit.estimate(1, 1, 1, 202.0)
    assert limit.limit == before


@pytest.mark.slow
@pytest.mark.parametrize("by", ["delays", "whole answers"])
def test_longer_prompts_are_not_taken_for_a_queue_for_long(by: str) -> None:
    """The least delay is that of before: by it the bound fell to a tenth for five minutes."""
    found = Site(lambda _: 64, 1).run(by=by, service_s=(0.5, 1.5), prompts_grow_at=60.0)
    unbounded = Site(lambda _: 64, 1, limited=False).run(by=by, service_s=(0.5, 1.5), prompts_grow_at=60.0)
    assert found.served >= 0.97 * unbounded.served
    bound, waiting = found.settled(180)
    assert bound >= 0.9 * 64
    assert waiting <= 64


def test_an_idle_bound_stays() -> None:
    limit = ConcurrencyLimit(0.0)
    for at in range(1, 300):
        limit.follow(ServerQueue(10.0, 0.0), 10, float(at))
        limit.estimate(0, 10, 10, at + 0.5)
        limit.estimate_whole(10, 10, at + 0.7)
    assert limit.limit == 256
