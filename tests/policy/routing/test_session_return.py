"""The probability that a session returns, as laws of what was observed."""

from __future__ import annotations

import random

import pytest

from policy.routing.session_return import ASSUMED, SessionReturns


def played(gaps: list[list[float]], seed: int = 1) -> SessionReturns:
    """Sessions with these seconds between their requests, which begin at random within 1000 s."""
    rng = random.Random(seed)  # noqa: S311 - reproducible
    events = []
    for session, gap in enumerate(gaps, 1):
        at = rng.uniform(0.0, 1000.0)
        events.append((at, session))
        for each in gap:
            at += each
            events.append((at, session))
    found = SessionReturns()
    for at, session in sorted(events):
        found.began(session, 7, at)
    return found


def test_without_observations_the_assumption_holds() -> None:
    assert SessionReturns().soon(3, 10.0) == ASSUMED


def test_a_session_is_known_by_its_turns_and_its_last_replica() -> None:
    found = SessionReturns()
    assert (found.began(5, 70, 1.0), found.turns(5), found.last(5)) == (0, 1, 70)
    assert (found.began(5, 80, 2.0), found.turns(5), found.last(5)) == (70, 2, 80)
    assert (found.turns(6), found.last(6)) == (0, 0)


def test_sessions_that_always_return_within_seconds_are_worth_most_until_then() -> None:
    found = played([[3.0] * 20 for _ in range(100)])
    assert found.soon(10, 2.5) > 0.8
    # Nobody ever returned after minutes, and some have waited for so long.
    assert found.soon(10, 200.0) < 0.1


def test_the_turns_so_far_tell_sessions_apart_that_mostly_end_after_the_first() -> None:
    found = played([[]] * 600 + [[4.0] * 40 for _ in range(30)])
    assert found.soon(1, 3.0) < 0.2 and found.soon(20, 3.0) > 0.7


def test_a_long_wait_is_no_end_where_people_take_their_time() -> None:
    rng = random.Random(2)  # noqa: S311 - reproducible
    gaps = [[rng.choice((2.0, 300.0)) for _ in range(10)] for _ in range(200)]
    found = played(gaps)
    assert found.soon(5, 140.0) > 0.5 and found.soon(5, 2.0) > 2.0 * found.soon(5, 30.0)


@pytest.mark.parametrize("count", [10_000])
def test_memory_is_bounded(count: int) -> None:
    found = SessionReturns()
    for i in range(count):
        found.began(i + 1, 7, float(i))
    assert len(found.known) <= 4096
