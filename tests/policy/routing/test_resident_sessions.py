"""What is held of sessions in one cache: the most recent, and the price of those that are next to go."""

from __future__ import annotations

import math

import pytest

from policy.routing.resident_sessions import ResidentSessions
from policy.routing.session_return import ASSUMED, SessionReturns

RETURNS = SessionReturns()


def used(*prompts: tuple[int, int, int], capacity: float = math.inf) -> ResidentSessions:
    """Each is a session, its prompt tokens, and how many of these it shares with others."""
    found = ResidentSessions()
    for at, (session, tokens, shared) in enumerate(prompts):
        found.use(session, 1, tokens, shared, float(at))
        found.settle(capacity, float(at), RETURNS)
    return found


def test_what_sessions_share_counts_for_none_of_them() -> None:
    found = used((1, 1000, 0), (2, 1500, 900), (2, 1800, 1500))
    assert (found.own, found.room) == (1000 + 900, math.inf)


def test_the_least_recent_leave_and_the_last_always_stays() -> None:
    found = used((1, 400, 0), (2, 400, 0), (1, 450, 400), (3, 300, 0), capacity=800)
    assert list(found.by_session) == [1, 3] and (found.own, found.room) == (750, 50)
    assert list(used((1, 9000, 0), (2, 9000, 0), capacity=800).by_session) == [2]


def test_a_session_that_went_on_elsewhere_is_worth_nothing() -> None:
    found = used(*((i, 100, 0) for i in range(1, 9)))
    assert found.chance == pytest.approx(ASSUMED, rel=0.01)
    for session in (1, 2, 3, 4):
        found.leave(session)
    found.settle(750.0, 9.0, RETURNS)
    assert found.chance == pytest.approx(0.25 * ASSUMED, rel=0.01)  # 2, 3, 4 and 5 are next
