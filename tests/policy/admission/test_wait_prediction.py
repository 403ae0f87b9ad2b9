"""Predicted waits: when a slot falls free, and a margin that follows recent errors."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from policy.admission.wait_prediction import BLOCK, LEAST, ServiceRate, WaitMargin
from policy.types import Priority

DRAWS: list[Callable[[random.Random], float]] = [
    lambda rng: rng.uniform(-1.0, 1.0),
    lambda rng: rng.gauss(0.0, 1.0),
    lambda rng: rng.expovariate(1.0),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_few_waits_exceed_the_margin(draw: Callable[[random.Random], float]) -> None:
    rng = random.Random(1)  # noqa: S311
    margin = WaitMargin()
    exceeded = 0
    for _ in range(20_000):
        error = draw(rng)
        exceeded += error > margin.slack_s(0.0)
        margin.learn(10.0, 10.0 + error)
    assert exceeded / 20_000 <= 1.2 / BLOCK


@pytest.mark.parametrize(
    ("waits", "predicted_s", "slack_s"),
    [
        ([6.0] * 20, 1.0, 5.0),
        ([6.0] * 20 + [1.2] * 2 * BLOCK, 1.0, 0.2),
        ([0.5] * 100, 2.0, LEAST * 2.0),
    ],
    ids=["the largest error", "outliers are forgotten", "the least margin"],
)
def test_the_margin_is_the_largest_last_error(waits: list[float], predicted_s: float, slack_s: float) -> None:
    margin = WaitMargin()
    for waited_s in waits:
        margin.learn(1.0, waited_s)
    assert margin.slack_s(predicted_s) == pytest.approx(slack_s)


@pytest.mark.parametrize(
    ("stay", "free_s"),
    [(lambda rng: 2.0, 2.0), (lambda rng: rng.expovariate(0.5), 0.25)],
    ids=["alike: together", "exponential: evenly"],
)
def test_slots_of_requests_that_began_together_fall_free(
    stay: Callable[[random.Random], float], free_s: float
) -> None:
    rate, rng = ServiceRate(), random.Random(2)  # noqa: S311
    for i in range(200):
        rate.began(i, 10, Priority.STANDARD, 0.0, waited=False)
        rate.ended(i, stay(rng), whole=True)
    for i in range(8):
        rate.began(i, 10, Priority.STANDARD, 100.0, waited=False)
    assert rate.free_s(0.0, 100.0) == pytest.approx(free_s, rel=0.5)


def test_one_very_long_request_among_different_ones_does_not_lower_the_rate() -> None:
    """Seven of eight slots serve requests of 10 tokens in 7 s on average, one a request of 400 s."""
    rate, rng = ServiceRate(), random.Random(3)  # noqa: S311
    ends = [(400.0, 0), *((rng.expovariate(1 / 7.0), ticket) for ticket in range(1, 8))]
    for _, ticket in ends:
        rate.began(ticket, 10, Priority.STANDARD, 0.0, waited=True)
    heapq.heapify(ends)
    for ticket in range(8, 1000):
        at, ended = heapq.heappop(ends)
        rate.busy(at, waits=True)
        rate.ended(ended, at, whole=True)
        rate.began(ticket, 10, Priority.STANDARD, at, waited=True)
        if not ended:
            break
        heapq.heappush(ends, (at + rng.expovariate(1 / 7.0), ticket))
    assert at == 400.0
    assert rate.free_s(590.0, at) == pytest.approx(59.0, rel=0.3)
