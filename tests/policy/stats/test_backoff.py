"""Exponential back-off: delays, their limit, and when the failure count is reset."""

from __future__ import annotations

import pytest

from policy.stats.backoff import Backoff, failures_after


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        (Backoff(0.1, 10.0), [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]),
        (Backoff(0.2, 10.0, factor=4.0), [0.2, 0.8, 3.2, 10.0]),
        (Backoff(0.5, 30.0, factor=4.0), [0.5, 2.0, 8.0, 30.0, 30.0]),
        (Backoff(0.5), [0.5, 1.0, 2.0, 4.0]),
    ],
)
def test_delays_grow_by_the_factor_up_to_the_limit(backoff: Backoff, delays: list[float]) -> None:
    assert [backoff.delay_s(1 + i) for i in range(len(delays))] == pytest.approx(delays)


def test_any_number_of_failures_has_a_delay() -> None:
    assert Backoff(0.1, 10.0, factor=4.0).delay_s(100_000) == 10.0


def test_a_stable_run_resets_the_failure_count() -> None:
    assert failures_after(5, lived_s=29.9, stable_s=30.0) == 6
    assert failures_after(5, lived_s=30.0, stable_s=30.0) == 1
