"""The slack covers the errors that happen, and no more than those."""

from __future__ import annotations

import random

import pytest

from policy.foresight import MISSES, Foresight


@pytest.mark.parametrize("spread_s", [0.01, 1.0, 30.0])
def test_few_wait_longer_than_with_the_slack(spread_s: float) -> None:
    rng = random.Random(1)  # noqa: S311
    foresight = Foresight()
    errors = [rng.uniform(-spread_s, spread_s) for _ in range(5000)]
    missed = 0
    for error in errors:
        missed += error > foresight.slack_s
        foresight.learn(10 * spread_s, 10 * spread_s + error)
    assert missed / len(errors) == pytest.approx(MISSES, abs=0.01)
    assert foresight.slack_s <= 2 * spread_s


def test_waits_that_are_shorter_need_no_slack() -> None:
    foresight = Foresight()
    for _ in range(100):
        foresight.learn(1.0, 0.5)
    assert foresight.slack_s == 0.0
