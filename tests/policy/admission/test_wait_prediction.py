"""The slack covers the errors that happen, and no more than those."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from policy.admission.wait_prediction import BLOCK, LEAST, WaitMargin

DRAWS: list[Callable[[random.Random], float]] = [
    lambda rng: rng.uniform(-1.0, 1.0),
    lambda rng: rng.gauss(0.0, 1.0),
    lambda rng: rng.expovariate(1.0),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_few_wait_longer_than_with_the_slack(draw: Callable[[random.Random], float]) -> None:
    rng = random.Random(1)  # noqa: S311
    foresight = WaitMargin()
    missed = 0
    for _ in range(20_000):
        error = draw(rng)
        missed += error > foresight.slack_s(0.0)
        foresight.learn(10.0, 10.0 + error)
    assert missed / 20_000 <= 1.2 / BLOCK


def test_a_machine_that_stood_still_is_forgotten() -> None:
    foresight = WaitMargin()
    for _ in range(20):
        foresight.learn(1.0, 6.0)
    assert foresight.slack_s(1.0) == 5.0
    for _ in range(2 * BLOCK):
        foresight.learn(1.0, 1.2)
    assert foresight.slack_s(1.0) == pytest.approx(0.2)


def test_waits_that_are_shorter_need_little_slack() -> None:
    foresight = WaitMargin()
    for _ in range(100):
        foresight.learn(1.0, 0.5)
    assert foresight.slack_s(2.0) == LEAST * 2.0
