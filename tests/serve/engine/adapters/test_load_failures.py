"""Failures of adapter loads: their back-off and how many are kept."""

from __future__ import annotations

import pytest

from policy.errors import AdapterRefused
from serve.engine.adapters.loader import BACKOFF, MAX_KEPT, AdapterLoadFailures

WRONG = AdapterRefused("rank", "the rank is 64")


def test_the_backoff_doubles_with_each_failure() -> None:
    failures, now = AdapterLoadFailures(), 100.0
    for backoff in (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0):
        failures.add("a", WRONG, now)
        assert failures.names(now) == ("a",)
        last = failures.standing("a", now + backoff - 0.01)
        assert last is not None
        assert (last.code, str(last)) == ("rank", "the rank is 64")
        # Each caller raises its own error.
        assert last is not WRONG
        now += backoff
        assert failures.standing("a", now) is None
        assert failures.names(now) == ()


@pytest.mark.parametrize("reset_by", ["a load", "time"])
def test_a_load_or_a_long_time_resets_the_backoff(reset_by: str) -> None:
    failures, later = AdapterLoadFailures(), 4 * BACKOFF.first_s + BACKOFF.max_s + 1
    for _ in range(3):
        failures.add("a", WRONG, 0.0)
    if reset_by == "a load":
        failures.forget("a")
        assert failures.standing("a", 0.0) is None
    assert failures.names(later) == ()
    failures.add("a", WRONG, later)
    assert failures.standing("a", later + BACKOFF.first_s) is None


def test_the_number_of_kept_failures_is_bounded() -> None:
    failures = AdapterLoadFailures()
    for number in range(MAX_KEPT + 10):
        failures.add(str(number), WRONG, 0.0)
    names = failures.names(0.0)
    assert len(names) == MAX_KEPT
    assert names[0] == "10"
